"""Rows of finished steps are kept until they are written, within bounds, and told from where they were heard."""

from __future__ import annotations

from elastic.step_metrics import MOST_ROWS, StepMetrics


def finished(steps: int, generation: int = 3) -> StepMetrics:
    metrics = StepMetrics(generation)
    for step in range(1, steps + 1):
        metrics.report(step, {"loss": step / 10})
        metrics.ended(step, 0.5, 8 * step)
    return metrics


def test_a_row_is_told_after_its_step_and_again_to_whoever_has_not_heard_it() -> None:
    metrics = finished(3)
    metrics.report(4, {"loss": 9.0})
    assert metrics.after((3, 1)) == (3, 24, [(2, 0.5, {"loss": 0.2}), (3, 0.5, {"loss": 0.3})])
    assert metrics.after((3, 3)) == (3, 24, [])
    assert [row[0] for row in metrics.after((2, 99))[2]] == [1, 2, 3], "the steps of an older generation are others"
    assert metrics.after((4, 0))[2] == []


def test_what_is_written_is_forgotten_and_what_nobody_writes_does_not_grow_for_ever() -> None:
    metrics = finished(5)
    metrics.forget((3, 2))
    assert [row[0] for row in metrics.after((-1, -1))[2]] == [3, 4, 5]
    metrics.forget((4, 0))
    assert metrics.after((-1, -1))[2] == []
    kept = finished(MOST_ROWS + 5).after((-1, -1))[2]
    assert (len(kept), kept[0][0]) == (MOST_ROWS, 6)


def test_reports_of_one_step_are_one_row_and_an_unfinished_step_has_none() -> None:
    metrics = StepMetrics(1)
    metrics.report(1, {"loss": 1.0, "rate": 2.0})
    metrics.report(1, {"loss": 3.0})
    metrics.ended(1, 0.1, 0)
    metrics.ended(2, 0.1, 0)
    metrics.report(3, {"loss": 4.0})
    assert metrics.after((1, 0))[2] == [(1, 0.1, {"loss": 3.0, "rate": 2.0}), (2, 0.1, {})]
