"""Durable save and verified load against torch.distributed.checkpoint, side by side in one run.

    python tests/benchmarks/save_load.py [--quick] [--json] [--repeats 5] [--shapes big,mid,medium,small] [--dir DIR]

DCP saves with its defaults (which fsync) and loads without checking; ours saves with fsync and checks every chunk
on loading. Medians over repeats in which the two take turns to be first. Files are deleted at the end of a repeat, and
the next begins when the disk is quiet: the blocks that a deletion gives back hold up the next fsync, whoever calls it.
Loads are from a warm page cache into preallocated tensors. With ``--json`` one object on the last line.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_run import QUICK, SHAPES, EngineRun, make_state, settle


def dcp_save(state: dict[str, torch.Tensor], directory: Path) -> float:
    started = time.perf_counter()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    return time.perf_counter() - started


def dcp_load(targets: dict[str, torch.Tensor], directory: Path) -> float:
    started = time.perf_counter()
    dcp.load(targets, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return time.perf_counter() - started


def check(state: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(state[name], targets[name]) for name in state), "what was loaded is not what was saved"


def measure(shape: tuple[int, int], repeats: int, directory: Path) -> dict[str, float]:
    """Medians in seconds of one shape, and the parts of ours."""
    state = make_state(*shape)
    times: dict[str, list[float]] = {}

    def note(key: str, value: float) -> None:
        times.setdefault(key, []).append(value)

    engine = EngineRun(directory, state)
    targets = engine.targets
    try:
        for i in range(repeats + 1):
            theirs = directory / f"dcp{i}"
            settle(directory)
            first = dcp_save(state, theirs) if i % 2 else None
            ref, parts = engine.save()
            parts.pop("uploaded_bytes")
            save = dcp_save(state, theirs) if first is None else first
            load = dcp_load(targets, theirs)
            check(state, targets)
            for target in targets.values():
                target.zero_()
            read = engine.load(ref)
            check(state, targets)
            shutil.rmtree(theirs)
            shutil.rmtree(directory / "store" / "bench" / "snapshots")
            if i == 0:
                continue  # Warms up imports, allocator, plan.
            note("dcp_save_s", save)
            note("dcp_load_s", load)
            note("ours_save_s", sum(parts.values()))
            note("ours_load_s", read.pop("load_total"))
            for name, seconds in (parts | read).items():
                note(f"part_{name}_s", seconds)
    finally:
        engine.close()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, one repeat")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--dir", default=None, help="directory on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    result: dict[str, dict[str, float]] = {"save_speedup": {}, "load_speedup": {}, "seconds": {}}
    shapes = QUICK if options.quick else SHAPES
    print(f"{'shape':8} {'dcp save':>9} {'ours':>7} {'×':>6}   {'dcp load':>9} {'ours':>7} {'×':>6}   parts of ours")
    for name in options.shapes.split(","):
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            found = measure(shapes[name], 1 if options.quick else options.repeats, Path(directory))
        save = found["dcp_save_s"] / found["ours_save_s"]
        load = found["dcp_load_s"] / found["ours_load_s"]
        result["save_speedup"][name], result["load_speedup"][name] = round(save, 2), round(load, 2)
        result["seconds"][name] = {key: round(value, 4) for key, value in found.items()}  # type: ignore[assignment]
        parts = " ".join(f"{k[5:-2]} {v * 1e3:.0f}ms" for k, v in found.items() if k.startswith("part_"))
        print(
            f"{name:8} {found['dcp_save_s']:9.3f} {found['ours_save_s']:7.3f} {save:6.1f}   "
            f"{found['dcp_load_s']:9.3f} {found['ours_load_s']:7.3f} {load:6.1f}   {parts}",
            flush=True,
        )
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
