"""What a snapshot writes when little has changed, and how much faster one is when nothing has.

    python tests/benchmarks/incremental.py [--quick] [--json] [--repeats 5] [--shape mid] [--dir DIR]

``uploaded_over_changed``: bytes of the new packs over bytes of the tensors that changed, with 1, 10 and 50 % of the
tensors changed (the largest of the three ratios). ``unchanged_speedup``: seconds of a full durable save over seconds of
one in which nothing changed, counted from the node snapshot on (upload with fsync, commit); making the node snapshot
takes its copy and its hash whatever has changed. ``unchanged_total_speedup`` counts these too. DCP, which has no
incremental save, stands beside it. Files stay until the end, see ``save_load.py``. With ``--json`` one object on the
last line.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_run import QUICK, SHAPES, EngineRun, make_state, settle
from save_load import dcp_save

CHANGED = (0.01, 0.1, 0.5)
PARTS = ("stage", "seal", "upload", "commit")


def change(state: dict[str, torch.Tensor], part: float) -> int:
    """Change so large a part of the tensors; the bytes of those."""
    chosen = list(state)[: max(1, round(len(state) * part))]
    for name in chosen:
        state[name].add_(1)
    return sum(state[name].nbytes for name in chosen)


def measure(shape: tuple[int, int], repeats: int, directory: Path) -> dict[str, object]:
    state = make_state(*shape)
    full: list[dict[str, float]] = []
    unchanged: list[dict[str, float]] = []
    theirs: list[float] = []
    ratios: dict[str, float] = {}
    engine = EngineRun(directory, state)
    try:
        for i in range(repeats + 1):
            settle(directory)
            seconds = dcp_save(state, directory / f"dcp{i}")
            ref, parts = engine.save()
            again, parts_again = engine.save(previous=ref)
            assert parts_again["uploaded_bytes"] == 0, "an unchanged state was written again"
            if i:
                full.append(parts)
                unchanged.append(parts_again)
                theirs.append(seconds)
            if i == repeats:
                for part in CHANGED:
                    changed = change(state, part)
                    again, found = engine.save(previous=again)
                    ratios[f"{part:.0%}"] = round(found["uploaded_bytes"] / changed, 4)
                engine.load(again)
                assert all(torch.equal(state[name], engine.targets[name]) for name in state), "the load differs"
    finally:
        engine.close()

    def total(runs: list[dict[str, float]], parts: tuple[str, ...]) -> float:
        return statistics.median(sum(run[part] for part in parts) for run in runs)

    return {
        "uploaded_over_changed": max(ratios.values()),
        "unchanged_speedup": round(total(full, PARTS[2:]) / total(unchanged, PARTS[2:]), 2),
        "unchanged_total_speedup": round(total(full, PARTS) / total(unchanged, PARTS), 2),
        "ratios": ratios,
        "full_s": round(total(full, PARTS), 4),
        "unchanged_s": round(total(unchanged, PARTS), 4),
        "dcp_s": round(statistics.median(theirs), 4),
        "parts_full_s": {part: round(total(full, (part,)), 4) for part in PARTS},
        "parts_unchanged_s": {part: round(total(unchanged, (part,)), 4) for part in PARTS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small shape, one repeat")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", default="mid", choices=tuple(SHAPES))
    parser.add_argument("--dir", default=None, help="directory on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    shape = (QUICK if options.quick else SHAPES)[options.shape]
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        result = measure(shape, 1 if options.quick else options.repeats, Path(directory))
    for key, value in result.items():
        print(f"{key:28} {value}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
