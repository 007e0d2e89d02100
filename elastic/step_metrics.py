"""What a train function reports of its steps in one generation, until the journal has it.

A row is there once its step has ended, so that it has its duration; what was reported of a step that never ends is
dropped. Every rank keeps rows, not only the one that is asked: another may have to tell what a lost one cannot. The
thread that trains only stores what it is given: a tensor is read by the thread that asks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

Row = tuple[int, float, dict[str, float]]
"""Step, seconds that it took, metrics."""

MOST_ROWS = 10_000
"""Rows that a rank keeps while nobody takes note of them; beyond that the oldest are forgotten."""


class StepMetrics:
    """Of one generation. Thread-safe: one thread reports, others ask."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._rows: deque[tuple[int, float, dict[str, Any]]] = deque(maxlen=MOST_ROWS)
        self._samples = 0
        self._step, self._reported = 0, dict[str, Any]()
        self._lock = threading.Lock()

    def report(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics of ``step``, which is still going on; more of them, if some were reported before."""
        if self._step != step:
            self._step, self._reported = step, {}
        for name, value in metrics.items():
            # A copy: the user may go on adding to the tensor, and a view would hold all that it is a view of.
            self._reported[name] = value.detach().clone() if hasattr(value, "detach") else value

    def ended(self, step: int, seconds: float, samples: int) -> None:
        """``step`` is over and took so long; ``samples`` were seen up to here."""
        row = self._reported if self._step == step else {}
        with self._lock:
            self._rows.append((step, seconds, row))
            self._samples = samples

    def forget(self, written: tuple[int, int]) -> None:
        """Drop the rows up to ``written`` (generation and step)."""
        with self._lock:
            while self._rows and (self.generation, self._rows[0][0]) <= written:
                self._rows.popleft()

    def after(self, heard: tuple[int, int]) -> tuple[int, int, list[Row]]:
        """(generation, samples seen, rows of the finished steps after ``heard``, with numbers for tensors)."""
        with self._lock:
            samples, rows = self._samples, [row for row in self._rows if (self.generation, row[0]) > heard]
        return (
            self.generation,
            samples,
            [(step, seconds, {name: _number(value) for name, value in row.items()}) for step, seconds, row in rows],
        )


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)
