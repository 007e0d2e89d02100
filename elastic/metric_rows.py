"""Rows of numbers by step, for a run of millions of them: columns of numbers instead of a dictionary each. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

MOST_ROWS = 200_000
"""Kept; beyond that the older half is thinned."""
WHOLE = ("step", "filled_from")
"""Columns of whole numbers."""


class MetricRows:
    """A row is what was told of one step. Steps mostly come in their order, which is what is cheap; any order works."""

    def __init__(self) -> None:
        self._steps, self._kinds, self._starts = array("q"), array("q"), array("q")
        """Of each row, in the order of steps: its step, which columns it has, and where its numbers begin."""
        self._numbers = array("d")
        self._columns: list[tuple[str, ...]] = []
        self._kind_of: dict[tuple[str, ...], int] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Steps with their rows, the earliest first."""
        return ((step, self._row(at)) for at, step in enumerate(self._steps))

    def _row(self, at: int) -> dict[str, float]:
        columns, start = self._columns[self._kinds[at]], self._starts[at]
        numbers = self._numbers[start : start + len(columns)]
        return {name: int(n) if name in WHOLE else n for name, n in zip(columns, numbers, strict=True)}

    def get(self, step: int) -> dict[str, float]:
        """The row of ``step``, empty if there is none."""
        at = bisect_left(self._steps, step)
        return self._row(at) if at < len(self._steps) and self._steps[at] == step else {}

    def put(self, step: int, row: Mapping[str, float]) -> None:
        """Keep ``row`` for ``step``, in place of one that is there."""
        columns = tuple(row)
        kind = self._kind_of.setdefault(columns, len(self._columns))
        if kind == len(self._columns):
            self._columns.append(columns)
        at, start = bisect_left(self._steps, step), len(self._numbers)
        self._numbers.extend(row.values())
        if at < len(self._steps) and self._steps[at] == step:
            self._kinds[at], self._starts[at] = kind, start
        else:
            self._steps.insert(at, step)
            self._kinds.insert(at, kind)
            self._starts.insert(at, start)
        if (count := len(self._steps)) > MOST_ROWS:
            self._keep(np.r_[1 : count // 2 : 2, count // 2 : count])

    def drop_after(self, step: int) -> None:
        """Forget the steps after ``step``."""
        at = bisect_right(self._steps, step)
        if at < len(self._steps):
            self._keep(np.arange(at))

    def _keep(self, rows: npt.NDArray[np.int64]) -> None:
        """Forget all but these rows, and every number that none of them has. Not in a loop, which would take a second:
        whoever asks has ranks to look after."""
        steps, kinds, starts = (np.asarray(column)[rows] for column in (self._steps, self._kinds, self._starts))
        widths = np.array([len(columns) for columns in self._columns], np.int64)[kinds]
        ends = np.cumsum(widths)
        numbers = np.asarray(self._numbers)[np.arange(widths.sum()) + np.repeat(starts - ends + widths, widths)]
        self._steps, self._kinds = array("q", steps.tobytes()), array("q", kinds.tobytes())
        self._starts, self._numbers = array("q", (ends - widths).tobytes()), array("d", numbers.tobytes())
