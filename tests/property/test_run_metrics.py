"""What a step reported is told with its time, whenever it is asked for, and as it was when it was reported."""

from __future__ import annotations

import torch

from elastic.gate import BoundaryGate, Order
from elastic.mesh import Mesh
from elastic.run import Run
from elastic.run_context import RunContext
from elastic.step_metrics import Row, StepMetrics


class Asks:
    """A rank whose metrics are collected in the middle of a boundary, before the step's time is known."""

    def __init__(self) -> None:
        self.metrics = StepMetrics(1)
        self.rows: list[Row] = []

    def restore_source(self) -> None: ...

    def formed_state(self, share_bytes: int, step: int) -> None: ...

    def at_end(self, step: int) -> None: ...

    def first_step(self, step: int) -> None:
        self.ask()

    def ask(self) -> None:
        self.rows += self.metrics.after((1, self.rows[-1][0] if self.rows else 0))[2]


class Passing(BoundaryGate):
    """A gate that nobody holds."""

    def hold(self, step: int) -> Order:
        raise StopIteration


def test_a_row_that_is_asked_for_too_early_is_told_whole_later() -> None:
    link = Asks()
    context = RunContext("metrics", 1, 0, Mesh((("dp", 1),)))
    run = Run(context, link, Passing(), metrics=link.metrics)  # type: ignore[arg-type]
    run.attach(model=torch.nn.Linear(1, 1))
    for _, _ in zip(range(3), run.steps(until_step=9), strict=False):
        run.report(loss=float(run.step))
    link.ask()
    assert [(step, row) for step, _, row in link.rows] == [(1, {"loss": 0.0}), (2, {"loss": 1.0})]
    assert all(seconds > 0 for _, seconds, _ in link.rows)


def test_a_tensor_that_is_added_to_later_was_reported_as_it_was() -> None:
    metrics = StepMetrics(1)
    total = torch.zeros(())
    for step in (1, 2):
        total += 1.0
        metrics.report(step, {"total": total})
        metrics.ended(step, 0.1, step)
    assert [row for _, _, row in metrics.after((1, 0))[2]] == [{"total": 1.0}, {"total": 2.0}]
