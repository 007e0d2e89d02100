"""Durable save and verified load against torch.distributed.checkpoint, side by side in one run.

    python tests/benchmarks/save_load.py [--quick] [--json] [--repeats 5] [--shapes big,mid,medium,small] [--dir DIR]

DCP saves with its defaults (which fsync) and loads without checking; ours saves with fsync and checks every chunk
on loading. Medians over repeats in which the two take turns to be first; a speedup is the median of their ratios.
Files stay until a shape is done: a disk can be several times as fast in blocks that a deletion just gave back as in
others, and whoever saves next has them. The next shape begins when the disk has taken those blocks back.
Loads are into preallocated tensors: ``load_speedup`` with all files in the page cache, ``cold_load_speedup`` with none.
With ``--json`` one object on the last line.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_run import QUICK, SHAPES, EngineRun, forget, make_state, settle

from elastic.snapshot.manifest import SnapshotRef

SPEEDUPS = ("save_speedup", "load_speedup", "cold_load_speedup")


def dcp_save(state: dict[str, torch.Tensor], directory: Path) -> float:
    started = time.perf_counter()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    return time.perf_counter() - started


def dcp_load(targets: dict[str, torch.Tensor], directory: Path) -> float:
    started = time.perf_counter()
    dcp.load(targets, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return time.perf_counter() - started


def loads(engine: EngineRun, theirs: Path, ref: SnapshotRef) -> tuple[float, dict[str, float]]:
    """Seconds of DCP's load, and those of ours with its parts; what was loaded is checked."""
    load = dcp_load(engine.targets, theirs)
    check(engine.state, engine.targets)
    for target in engine.targets.values():
        target.zero_()
    read = engine.load(ref)
    check(engine.state, engine.targets)
    return load, read


def warm(directory: Path) -> None:
    """Bring all files into the page cache."""
    for path in filter(Path.is_file, directory.rglob("*")):
        with open(path, "rb", buffering=0) as file:
            while file.read(8 << 20):
                pass


def chill(directory: Path) -> None:
    """Take all files out of the page cache."""
    for path in filter(Path.is_file, directory.rglob("*")):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def check(state: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    assert all(torch.equal(state[name], targets[name]) for name in state), "what was loaded is not what was saved"


def measure(shape: tuple[int, int], repeats: int, directory: Path) -> dict[str, float]:
    """Medians in seconds of one shape, and the parts of ours."""
    state = make_state(*shape)
    times: dict[str, list[float]] = {}

    def note(key: str, value: float) -> None:
        times.setdefault(key, []).append(value)

    engine = EngineRun(directory, state)
    try:
        for i in range(repeats + 1):
            theirs = directory / f"dcp{i}"
            settle(directory)
            first = dcp_save(state, theirs) if i % 2 else None
            ref, parts = engine.save()
            parts.pop("uploaded_bytes")
            save = dcp_save(state, theirs) if first is None else first
            warm(directory)
            load, read = loads(engine, theirs, ref)
            chill(directory)
            cold_load, cold_read = loads(engine, theirs, ref)
            if i == 0:
                continue  # Warms up imports, allocator, plan.
            ours_save, ours_load, ours_cold = sum(parts.values()), read.pop("load_total"), cold_read["load_total"]
            note("save_speedup", save / ours_save)
            note("load_speedup", load / ours_load)
            note("cold_load_speedup", cold_load / ours_cold)
            note("dcp_save_s", save)
            note("dcp_load_s", load)
            note("ours_save_s", ours_save)
            note("ours_load_s", ours_load)
            note("dcp_cold_load_s", cold_load)
            note("ours_cold_load_s", ours_cold)
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
    result: dict[str, dict[str, Any]] = {key: {} for key in (*SPEEDUPS, "seconds")}
    shapes = QUICK if options.quick else SHAPES
    heads = [f"{what:>9} {'ours':>7} {'×':>6}" for what in ("dcp save", "dcp load", "cold")]
    print(f"{'shape':8} {'   '.join(heads)}   parts of ours")
    for name in options.shapes.split(","):
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            found = measure(shapes[name], 1 if options.quick else options.repeats, Path(directory))
        if not options.quick:
            forget()
        for key in SPEEDUPS:
            result[key][name] = round(found.pop(key), 2)
        result["seconds"][name] = {key: round(value, 4) for key, value in found.items()}
        parts = " ".join(f"{k[5:-2]} {v * 1e3:.0f}ms" for k, v in found.items() if k.startswith("part_"))
        row = [
            f"{found[f'dcp_{what}_s']:9.3f} {found[f'ours_{what}_s']:7.3f} {result[f'{what}_speedup'][name]:6.1f}"
            for what in ("save", "load", "cold_load")
        ]
        print(f"{name:8} {'   '.join(row)}   {parts}", flush=True)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
