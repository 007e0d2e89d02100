"""Writes the journal: a decision is durable before it is acted on, measurements when there is time.

A store that does not answer never stops training: what could not be written stays in memory and goes out with the
next segment, and the status says that the journal lags.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic.clock import now, wall
from elastic.errors import SnapshotError
from elastic.journal import encode, segment_key
from elastic.observe.decisions import sentence
from elastic.storage.blob_store import BlobStore

log = logging.getLogger("elastic.journal")

DECISION_TIMEOUT_S = 5.0
MOST_TOLD = 1000


class JournalWriter:
    """One controller's segments. Used from one event loop. ``state`` gives what a successor needs of the run's state:
    it stands at the head of a segment, or the head names the segment in which it was last written.
    """

    def __init__(self, store: BlobStore, run: str, controller: str, state: Callable[[], dict[str, Any]]) -> None:
        self.store, self.run, self.controller = store, run, controller
        self.lag = ""
        """Why the last write failed; empty when everything is written."""
        self.generation = 0
        """Written at the head of every segment, so that a successor finds the last one without reading all."""
        self.epoch = 0
        """The number of this controller, and ``life``: the name of the first one of this life of the run."""
        self.life = controller
        self._state = state
        self._written_state: dict[str, Any] | None = None
        self._state_in = -1
        self.metrics_written = (-1, -1)
        """Generation and step up to which rows of metrics are written."""
        self.told: deque[tuple[float, str]] = deque(maxlen=MOST_TOLD)
        """What a person wants to read of what was noted: seconds since 1970, and a sentence."""
        self._pending: list[dict[str, Any]] = []
        self._sequence = 0
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")

    def note(self, kind: str, **fields: Any) -> None:
        """Add a record; it is written with the next decision or flush."""
        record = {"kind": kind, "t": round(wall(), 3), **fields}
        self._pending.append(record)
        if text := sentence(record):
            self.told.append((wall(), text))

    async def flush(self) -> bool:
        """Write what is pending. False, with ``lag`` set, where the store does not take it in time."""
        async with self._lock:
            if not self._pending:
                return True
            records, self._pending = self._pending, []
            key = segment_key(self.run, self.controller, self._sequence)
            state = self._state()
            head = {
                "kind": "segment",
                "t": round(wall(), 3),
                "clock": now(),
                "generation": self.generation,
                "epoch": self.epoch,
                "life": self.life,
                "state_in": self._state_in,
            }
            if state != self._written_state:
                head["state"] = state
            loop = asyncio.get_running_loop()
            write = loop.run_in_executor(self._thread, self.store.put, key, encode([head, *records]))
            try:
                await asyncio.wait_for(asyncio.shield(write), DECISION_TIMEOUT_S)
            except (SnapshotError, OSError, asyncio.TimeoutError) as error:
                self.lag = f"{type(error).__name__}: {error}".rstrip(": ")
                self._pending = records + self._pending
                log.warning("the journal could not be written, training goes on: %s", self.lag)
                self._sequence += 1
                return False
            if "state" in head:
                self._written_state, self._state_in = state, self._sequence
            for record in records:
                if record["kind"] == "metrics" and record["rows"]:
                    self.metrics_written = record["generation"], record["rows"][-1][0]
            self._sequence += 1
            self.lag = ""
            return True
