"""Rows by step, against a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic import metric_rows
from elastic.metric_rows import MetricRows

NUMBERS = st.floats(allow_nan=False)
ROWS = st.dictionaries(st.sampled_from(["loss", "step_s", "accuracy"]), NUMBERS)
STORY = st.lists(st.tuples(st.integers(0, 30), ROWS | st.none()))
"""Steps with the row that is put there; none where all that follow are dropped."""


@given(STORY)
def test_rows_are_those_of_a_dictionary(story: list[tuple[int, dict[str, float] | None]]) -> None:
    rows, known = MetricRows(), dict[int, dict[str, float]]()
    for step, row in story:
        if row is not None:
            rows.put(step, row)
            known[step] = row
        else:
            rows.drop_after(step)
            known = {other: row for other, row in known.items() if other <= step}
    assert list(rows) == sorted(known.items())
    assert len(rows) == len(known)
    assert all(rows.get(step) == known.get(step, {}) for step in range(31))


def test_whole_numbers_stay_whole() -> None:
    rows = MetricRows()
    rows.put(3, {"step": 3, "step_s": 0.5, "filled_from": 1})
    assert [type(value) for value in rows.get(3).values()] == [int, float, int]


def test_of_too_many_rows_every_second_of_the_older_half_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_rows, "MOST_ROWS", 100)
    rows = MetricRows()
    for step in range(101):
        rows.put(step, {"loss": float(step)})
    left = [step for step, _ in rows]
    assert left == [*range(1, 50, 2), *range(50, 101)]
    assert all(row == {"loss": step} for step, row in rows)
