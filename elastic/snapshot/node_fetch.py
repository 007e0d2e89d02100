"""Each chunk that a node lacks is fetched once for all its ranks: from a peer or from storage, verified, into memory
that the ranks map.

The ranks say first what they want, all of it. A chunk is read when the first of them asks for it and stays until the
last that wants it has had it, within a budget. All go through their chunks in one order, and half of the room is kept
for whoever is furthest behind, so a rank that is ahead waits and none waits for ever. One that does not come holds
nobody up for long: what only it still wants is then let go, and is read again if it does come.

Thread-safe. Memory is one file, cut into segments; a segment is free again when all of its chunks are.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from elastic.errors import StorageError
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.sources import Rows, VerifiedSource

FETCH_BYTES = 128 << 20
"""Most bytes of fetched chunks on a node."""
SEGMENT_BYTES = 8 << 20
JOIN_WAIT_S = 5.0
"""How long the first rank waits for the others of its node to say what they want."""
STALL_WAIT_S = 10.0
"""How long a rank waits for room before what nobody has asked for yet is let go."""

ABSENT, COMING = -1, -2
LATE = 1 << 62


@dataclass(slots=True)
class _Segment:
    start: int
    rows: Rows = field(default_factory=lambda: np.zeros(0, np.int64))
    handed: int = 0
    """Answers that refer to it and were not given back."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where chunks lie in the file ``path``: ``offset`` [n], -1 where no copy was good. ``origin`` [n] says, by its
    place in ``names``, which copy each came from. Give ``ticket`` back when the bytes are not needed any more."""

    path: str
    offset: Rows
    origin: npt.NDArray[np.int8]
    names: tuple[str, ...]
    damaged: tuple[str, ...]
    ticket: int


class NodeFetch:
    """One restore of one snapshot on one node, by ``readers`` ranks. ``path`` is made on first use."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        table: ChunkTable,
        source: VerifiedSource,
        readers: int,
        *,
        budget_bytes: int = FETCH_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.table, self.readers = os.fspath(path), table, readers
        self._source, self._clock = source, clock
        self._segment_bytes = min(SEGMENT_BYTES, max(1, budget_bytes))
        self._most = max(1, budget_bytes // self._segment_bytes)
        self._segments: list[_Segment] = []
        self._free: list[int] = []
        self._map: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._file = -1
        self._offset = np.full(len(table), ABSENT, np.int64)
        self._in_segment = np.zeros(len(table), np.int32)
        self._origin = np.zeros(len(table), np.int8)
        self._wanted = np.zeros(len(table), np.int32)
        """Ranks that have said that they want a chunk and have not had it yet."""
        self._announced: dict[int, npt.NDArray[np.bool_]] = {}
        self._key = np.empty(len(table), np.int64)
        """The order in which all go through the chunks."""
        self._key[np.lexsort(np.stack([table.byte_start, table.pack_id.astype(np.int64)]))] = np.arange(len(table))
        self._ahead: dict[int, Rows] = {}
        """What each has still to come, in order; what it has had is dropped from the front."""
        self._left: set[int] = set()
        self._tickets: dict[int, list[int]] = {}
        self._number = 0
        self._first_came: float | None = None
        self._patient = True
        self._closed = ""
        self.window_bytes = max(self._segment_bytes // 2, budget_bytes // (3 * readers))
        """What a reader should ask for at a time: one window that it copies, the next, and room to cut them."""
        self._change = threading.Condition()

    def announce(self, reader: int, rows: Rows, late: npt.NDArray[np.bool_] | None = None) -> None:
        """All that ``reader`` will ask for, by pack and byte, those of ``late`` last. Waits, not for long, until every
        reader of the node has said so."""
        with self._change:
            mask = np.zeros(len(self.table), bool)
            mask[rows] = True
            if (before := self._announced.get(reader)) is not None:
                self._wanted -= before
            self._announced[reader] = mask
            self._wanted += mask
            if late is not None:
                self._key[rows[late]] |= LATE
            self._ahead[reader] = rows[np.argsort(self._key[rows], kind="stable")]
            self._change.notify_all()
            if self._first_came is None:
                self._first_came = self._clock()
            until = self._first_came + JOIN_WAIT_S
            while len(self._announced) < self.readers and (left := until - self._clock()) > 0 and not self._closed:
                self._change.wait(left)

    def fetch(self, reader: int, rows: Rows) -> Fetched:
        """Where ``rows`` lie, read first if need be. Raises StorageError if a store does not answer, or if the restore
        was closed meanwhile."""
        rows = np.asarray(rows, np.int64)
        deadline = self._clock() + STALL_WAIT_S
        bad = np.zeros(len(self.table), bool)
        mine: list[int] = []
        known = len(self._source.damaged)
        try:
            while True:
                with self._change:
                    self._check_open()
                    state = self._offset[rows]
                    missing = rows[(state == ABSENT) & ~bad[rows]]
                    if not len(missing) and not (state == COMING).any():
                        return self._hand_out(reader, rows, known)
                    part, places = self._make_room(reader, missing, deadline, mine)
                    if not len(part):
                        self._change.wait(0.2)
                        continue
                    memory = self._map
                good = np.zeros(len(part), bool)
                try:
                    good = self._read(part, places, memory)
                finally:
                    with self._change:
                        self._offset[part] = np.where(good, places, ABSENT)
                        bad[part[~good]] = True
                        deadline = self._clock() + STALL_WAIT_S
                        self._change.notify_all()
        finally:
            with self._change:
                self._let_go_of(mine)

    def give_back(self, ticket: int) -> None:
        """The bytes of an answer are not needed any more."""
        with self._change:
            self._let_go_of(self._tickets.pop(ticket, []))

    def leave(self, reader: int) -> bool:
        """``reader`` asks for nothing any more; whether it was the last."""
        with self._change:
            mask = self._announced.get(reader)
            if mask is not None:
                self._wanted -= mask
                mask[:] = False
            self._left.add(reader)
            self._let_go_of([])
            return len(self._left) >= self.readers

    def close(self, reason: str = "the restore is over") -> None:
        """Give the memory back; whoever still asks is refused."""
        with self._change:
            self._closed = self._closed or reason
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path)
            self._change.notify_all()

    # ---- under the lock

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"nothing more is fetched here: {self._closed}", self.path)

    def _hand_out(self, reader: int, rows: Rows, known: int) -> Fetched:
        found = self._offset[rows]
        segments = np.unique(self._in_segment[rows[found >= 0]]).tolist()
        for number in segments:
            self._segments[number].handed += 1
        self._number += 1
        self._tickets[self._number] = segments
        if (mask := self._announced.get(reader)) is not None:
            had = rows[mask[rows]]
            self._wanted[had] -= 1
            mask[had] = False
        return Fetched(
            self.path,
            np.maximum(found, ABSENT),
            self._origin[rows],
            tuple(copy.name for copy in self._source.copies),
            tuple(self._source.damaged[known:]),
            self._number,
        )

    def _is_last(self, reader: int) -> bool:
        """Whether nobody is further behind than ``reader``."""
        frontier: dict[int, int] = {}
        for other, rows in self._ahead.items():
            had = ~self._announced[other][rows]
            first = len(rows) if had.all() else int(np.argmin(had))
            self._ahead[other] = rows = rows[first:]
            if len(rows):
                frontier[other] = int(self._key[rows[0]])
        return frontier.get(reader, -1) <= min(frontier.values(), default=0)

    def _make_room(self, reader: int, missing: Rows, deadline: float, mine: list[int]) -> tuple[Rows, Rows]:
        """Places for the first of ``missing``, as many as there is room for now: the rows and their offsets. They are
        marked as coming, and their segments held in ``mine``."""
        parts, places = [], []
        kept = 0 if self._is_last(reader) else self._most // 2
        while len(missing) and (number := self._segment(deadline, kept, first=not parts)) is not None:
            ends = np.cumsum(self.table.nbytes[missing])
            part = missing[: max(1, int(np.searchsorted(ends, self._segment_bytes, side="right")))]
            at = self._segments[number].start + ends[: len(part)] - self.table.nbytes[part]
            self._segments[number].rows = part
            self._segments[number].handed += 1
            mine.append(number)
            self._offset[part], self._in_segment[part] = COMING, number
            parts.append(part)
            places.append(at)
            missing = missing[len(part) :]
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *parts]), np.concatenate([none, *places])

    def _segment(self, deadline: float, kept: int, first: bool) -> int | None:
        """A segment that is free, if more than ``kept`` are, or None: wait. After the deadline one is made free, or the
        budget is broken: more memory is better than no restore."""
        if len(self._free) + self._most - len(self._segments) > kept:
            return self._free.pop() if self._free else self._grow()
        if not first or (self._patient and self._clock() < deadline):
            return None
        self._patient = False
        if not self._free:
            idle = [number for number, segment in enumerate(self._segments) if not segment.handed]
            if not idle:
                return self._grow()
            self._empty(idle[0])
        return self._free.pop()

    def _grow(self) -> int:
        """One more segment, at the end of the file."""
        if self._file < 0:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        number = len(self._segments)
        start = number * self._segment_bytes
        os.ftruncate(self._file, max(start + self._segment_bytes, self._most * self._segment_bytes))
        if len(self._map) < start + self._segment_bytes:
            self._map = np.frombuffer(mmap.mmap(self._file, 0), np.uint8)
        self._segments.append(_Segment(start))
        return number

    def _let_go_of(self, segments: list[int]) -> None:
        """One answer less refers to these; what nobody wants any more is free."""
        for number in segments:
            self._segments[number].handed -= 1
        for number, segment in enumerate(self._segments):
            if not segment.handed and len(segment.rows) and not self._wanted[segment.rows].any():
                self._empty(number)
        self._change.notify_all()

    def _empty(self, number: int) -> None:
        segment = self._segments[number]
        held = segment.rows[self._in_segment[segment.rows] == number]
        self._offset[held] = ABSENT
        segment.rows = held[:0]
        self._free.append(number)

    # ---- outside of the lock

    def _read(self, part: Rows, places: Rows, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Verified bytes into their places; False where no copy is good."""
        ends = places + self.table.nbytes[part]
        view = memory.data
        targets = [view[start:end] for start, end in zip(places.tolist(), ends.tolist())]
        origin = self._source.fill(self.table, part, targets)
        self._origin[part] = origin
        return origin >= 0
