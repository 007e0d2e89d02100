"""Events on their way from a rank or a store to the controller: kept until they are read, whoever the controller is.

The controller holds one pending ``poll`` call on every actor. It returns when there are events, and raises within
milliseconds when the process dies: one mechanism for news and for death. Events carry sequence numbers, so that a
controller that comes back goes on where its predecessor stopped.
"""

from __future__ import annotations

import threading
from typing import Any


class Outbox:
    """A bounded wait for events with sequence numbers. Thread-safe."""

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._first = 0
        self._condition = threading.Condition()

    def put(self, event: Any) -> None:
        """Add an event and wake the pending poll."""
        with self._condition:
            self._events.append(event)
            self._condition.notify_all()

    @property
    def following(self) -> int:
        """The number of the next event."""
        with self._condition:
            return self._first + len(self._events)

    def poll(self, after: int, timeout_s: float) -> tuple[int, list[Any]]:
        """(next sequence number, events from ``after`` on); empty after ``timeout_s``. Earlier ones are forgotten."""
        with self._condition:
            drop = max(0, after - self._first)
            del self._events[:drop]
            self._first += drop
            if not self._events:
                self._condition.wait(timeout_s)
            return self._first + len(self._events), list(self._events)
