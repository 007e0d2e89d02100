"""What the controller hears of, one event at a time, and the time at which it should not wait any longer."""

from __future__ import annotations

import asyncio
from typing import Any

from elastic.clock import now
from elastic.protocol.run_events import Late, Tick

LOOK_S = 1.0
"""How long one wait is at most: what comes on top of it is time in which this process did not run."""
NOTICED_S = 0.25
"""Shorter times in which nobody could be heard count for deadlines like any other."""


class Inbox:
    """Events in the order in which they came; ``Tick`` at a deadline if nothing is queued.

    Time in which nobody could be heard, because the last event took long to act on (its record waits for the storage)
    or the machine stood still, is told as ``Late`` before anything else.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._handed_out_at = now()
        self._deaf_s = 0.0

    def put(self, event: Any) -> None:
        """Queue an event behind those that are there."""
        self._queue.put_nowait(event)

    async def next(self, deadline: float | None) -> Any:
        """The next event. ``deadline`` is on the clock of ``elastic.clock.now``; None waits for as long as it takes."""
        self._deaf_s += now() - self._handed_out_at
        event = await self._next(deadline)
        self._handed_out_at = now()
        return event

    async def _next(self, deadline: float | None) -> Any:
        while True:
            deaf_s, self._deaf_s = self._deaf_s, 0.0
            started = now()
            if deadline is not None and deaf_s > NOTICED_S:
                return Late(started, deaf_s)
            if not self._queue.empty():
                return self._queue.get_nowait()
            if deadline is None:
                return await self._queue.get()
            if started >= deadline:
                return Tick(started)
            patience_s = min(LOOK_S, deadline - started)
            try:
                return await asyncio.wait_for(self._queue.get(), patience_s)
            except asyncio.TimeoutError:
                pass
            finally:
                self._deaf_s = max(0.0, now() - started - patience_s)
