"""What a run tells of itself survives late news and steps that are done again."""

from __future__ import annotations

from typing import Any

from actors.chronicle import Chronicle
from elastic.mesh import Mesh
from elastic.protocol import run_lifecycle as life
from elastic.protocol.tiers import NodeSnapshot, RestoreOrder


def begun(generation: int, step: int | None) -> life.BeginGeneration:
    order = None if step is None else RestoreOrder(step, NodeSnapshot("a", step, {0: ("n",)}), None, "")
    return life.BeginGeneration(generation, ("m0",), Mesh((("dp", 1),)), order, hold=step is None, reason="")


def rows(first: int, last: int, loss: float) -> list[tuple[int, float, dict[str, float]]]:
    return [(step, 0.5, {"loss": loss}) for step in range(first, last + 1)]


def ended(chronicle: Chronicle) -> Any:
    chronicle.ended(life.EndRun("finished", ""), None, None, 100.0)
    return chronicle.result


def test_steps_done_again_count_once_with_their_last_value() -> None:
    told = Chronicle("run", "/s")
    told.began(begun(1, None), ("n",), 0.0)
    told.measured(1, 10, rows(1, 9, loss=1.0), 10.0)
    told.began(begun(2, 6), ("n",), 11.0)
    told.measured(2, 12, rows(7, 12, loss=2.0), 20.0)
    result = ended(told)
    assert [row["step"] for row in result.metrics] == list(range(1, 13))
    assert [row["loss"] for row in result.metrics] == [1.0] * 6 + [2.0] * 6
    assert result.productive_s == 6.0


def test_rows_of_an_older_generation_that_come_late_count_as_far_as_its_steps_do() -> None:
    told = Chronicle("run", "/s")
    told.began(begun(1, None), ("n",), 0.0)
    told.measured(1, 10, rows(1, 5, loss=1.0), 5.0)
    told.began(begun(2, 8), ("n",), 6.0)
    told.measured(2, 20, rows(9, 10, loss=2.0), 8.0)
    told.measured(1, 16, rows(6, 9, loss=1.0), 9.0)
    assert [row["loss"] for row in ended(told).metrics] == [1.0] * 8 + [2.0] * 2
