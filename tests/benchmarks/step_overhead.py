"""What does ``run.steps`` cost per step while no snapshot is taken?

One rank, 100 tensors attached, a loader with trivial data; everything that a real step passes through: the boundary
gate, the derived generators, the loader's fetch and advance, the ledger, the metrics. The user's own work is empty, so
the time of the loop is the overhead. Target: at most 50 µs.

    python tests/benchmarks/step_overhead.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from elastic.data.loader import ElasticLoader
from elastic.gate import BoundaryGate
from elastic.mesh import Mesh
from elastic.run import Run
from elastic.run_context import RunContext

TENSORS = 100


class Trivial(torch.utils.data.Dataset):
    """Items that cost nothing, fetched by the batch."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class NoLink:
    """A rank without a process around it: nothing is restored, nothing is told."""

    def restore_source(self) -> None:
        return None

    def formed_state(self, share_bytes: int, step: int) -> None: ...

    def first_step(self, step: int) -> None: ...


def microseconds_per_step(steps: int, with_loader: bool) -> float:
    """Mean over ``steps`` steps, after a warm-up."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(16)) for _ in range(TENSORS)])
    run = Run(RunContext("bench", 1, 0, Mesh((("dp", 1),))), NoLink(), BoundaryGate())  # type: ignore[arg-type]
    loader = ElasticLoader(Trivial(), global_batch_size=8, seed=1, collate_fn=list)
    run.attach(model=model, loader=loader)
    turns = run.steps(loader, until_step=10**9) if with_loader else run.steps(until_step=10**9)
    for _, _ in zip(range(200), turns, strict=False):
        run.report(loss=0.0)
    started = time.perf_counter()
    for _, _ in zip(range(steps), turns, strict=False):
        run.report(loss=0.0)
    return (time.perf_counter() - started) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: a smoke run")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    steps, rounds = (500, 2) if arguments.quick else (5000, 7)
    found: dict[str, Any] = {}
    table = Table("loop", "µs per step, median", "least", "most", title=f"run.steps, {TENSORS} tensors attached")
    for name, with_loader in (("without a loader", False), ("with a loader", True)):
        values = [microseconds_per_step(steps, with_loader) for _ in range(rounds)]
        found[name] = statistics.median(values)
        table.add_row(name, *(f"{value:.1f}" for value in (found[name], min(values), max(values))))
    Console().print(table)
    if arguments.json:
        print(
            json.dumps({"us_per_step": found["with a loader"], "us_per_step_without_loader": found["without a loader"]})
        )


if __name__ == "__main__":
    main()
