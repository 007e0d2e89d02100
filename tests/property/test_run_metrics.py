"""What a step reported is told once, with its time, whenever it is asked for."""

from __future__ import annotations

import torch

from elastic.gate import BoundaryGate, Order
from elastic.mesh import Mesh
from elastic.run import Run
from elastic.run_context import RunContext


class Asks:
    """A rank whose metrics are collected in the middle of a boundary, before the step's time is known."""

    run: Run

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, dict[str, float]]] = []

    def restore_source(self) -> None: ...

    def formed_state(self, share_bytes: int, step: int) -> None: ...

    def at_end(self, step: int) -> None: ...

    def first_step(self, step: int) -> None:
        self.rows += self.run.take_metrics()[1]


class Passing(BoundaryGate):
    """A gate that nobody holds."""

    def hold(self, step: int) -> Order:
        raise StopIteration


def test_a_row_that_is_asked_for_too_early_is_told_whole_later() -> None:
    link = Asks()
    run = link.run = Run(RunContext("metrics", 1, 0, Mesh((("dp", 1),))), link, Passing())  # type: ignore[arg-type]
    run.attach(model=torch.nn.Linear(1, 1))
    for _, _ in zip(range(3), run.steps(until_step=9), strict=False):
        run.report(loss=float(run.step))
    link.rows += run.take_metrics()[1]
    assert [(step, row) for step, _, row in link.rows] == [(1, {"loss": 0.0}), (2, {"loss": 1.0})]
    assert all(seconds > 0 for _, seconds, _ in link.rows)
