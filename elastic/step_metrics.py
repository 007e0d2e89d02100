"""What a train function reports of its steps, until another thread takes it away.

A row is given away once its step has ended, so that it has its duration; what was reported of a step that never ends
stays. The thread that trains only stores what it is given: a tensor is read by the thread that takes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

Row = tuple[int, float, dict[str, float]]
"""Step, seconds that it took, metrics."""


class StepMetrics:
    """Thread-safe: one thread reports, another takes."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float, dict[str, Any]]] = []
        self._timed_step = 0
        self._lock = threading.Lock()

    def report(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics of ``step``, which is still going on; tensors as they are."""
        row = {name: value.detach() if hasattr(value, "detach") else value for name, value in metrics.items()}
        with self._lock:
            self._rows.append((step, 0.0, row))

    def ended(self, step: int, seconds: float) -> None:
        """``step`` is over, and took so long."""
        with self._lock:
            row = self._rows.pop()[2] if self._rows and self._rows[-1][0] == step else {}
            self._rows.append((step, seconds, row))
            self._timed_step = step

    def take(self) -> list[Row]:
        """The rows of the steps that have ended since the last call, as numbers."""
        with self._lock:
            done = [row for row in self._rows if row[0] <= self._timed_step]
            self._rows = self._rows[len(done) :]
        return [(step, seconds, {name: _number(value) for name, value in row.items()}) for step, seconds, row in done]


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)
