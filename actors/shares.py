"""How a rank reads a snapshot: what lies in its own node's memory from the map of it, the rest through its store.

The store assembles the index and fetches every chunk once for all ranks of the node (see Restores). What it read it has
checked; what the rank finds in its node's arenas it checks itself, and a bad chunk is asked of the store.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from actors.names import NAMESPACE, store_name
from elastic.errors import ElasticError, RestoreError, StorageError
from elastic.protocol.tiers import RestoreOrder
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.node_fetch import Fetched
from elastic.snapshot.sources import Chunk, Copy, Rows, ServedCopy, VerifiedSource

LOCATE_TIMEOUT_S = 30.0


class StoreReader:
    """Opens snapshots of either tier for one rank."""

    def __init__(self, run: str, node: str) -> None:
        self.run, self.node = run, node
        self._store: Any = None
        self._reading: tuple[int, int] | None = None

    def open(
        self, order: RestoreOrder, generation: int, rank: int, readers: int
    ) -> tuple[SnapshotIndex, VerifiedSource, str]:
        """Index and source of the snapshot that was ordered, for one of ``readers`` ranks of this node, and its tier.
        Raises RestoreError."""
        self._store = ray.get_actor(store_name(self.run, self.node), namespace=NAMESPACE)
        opened = _answer(self._store.open_restore.remote(generation, order, readers))
        index: SnapshotIndex = ray.get(opened.index)
        self._reading = (generation, rank)
        copies: list[Copy] = [_ThroughStore(self._store, generation, rank)]
        if order.node is not None:
            copies.insert(0, ServedCopy("own node", _OwnMemory(self._store).serve, mapped=True))
        return index, VerifiedSource(copies, opened.window_bytes), opened.tier

    def done(self) -> None:
        """Everything has been read: the store may give its memory back."""
        if self._reading is not None:
            self._store.leave.remote(*self._reading)
            self._reading = None


def _answer(call: Any) -> Any:
    """What the store answered; an error that it gave as its answer is raised."""
    try:
        found = ray.get(call)
    except RayError as error:
        raise RestoreError(f"the node's store does not answer: {error}") from None
    if isinstance(found, ElasticError):
        raise found
    return found


class _OwnMemory:
    """Ranges of packs in this node's arenas, as views of the rank's own map of the slot."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._maps: dict[str, np.ndarray[Any, Any] | None] = {}

    def serve(self, pack: str, byte_start: Rows, nbytes: Rows) -> Sequence[memoryview] | None:
        if pack not in self._maps:
            slot = ray.get(self._store.locate.remote(pack), timeout=LOCATE_TIMEOUT_S)
            self._maps[pack] = None if slot is None else np.memmap(slot.path, np.uint8, mode="r")
        data = self._maps[pack]
        if data is None:
            return None
        view = memoryview(data)
        return [view[start : start + size] for start, size in zip(byte_start.tolist(), nbytes.tolist())]


class _ThroughStore:
    """Chunks that the node's store fetches, as views of the memory that it shares with its ranks."""

    name = "store"

    def __init__(self, store: Any, generation: int, rank: int) -> None:
        self._store, self._generation, self._rank = store, generation, rank
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()
        self.damaged: list[str] = []
        self.bytes_from: dict[str, int] = {}

    def announce(self, table: ChunkTable, rows: Rows, late: np.ndarray[Any, Any]) -> None:
        """See ``PlanningCopy.announce``."""
        _answer(self._store.announce.remote(self._generation, self._rank, rows, late))

    def fetch(self, table: ChunkTable, rows: Rows) -> list[Chunk | None]:
        """See ``Copy.fetch``."""
        if not len(rows):
            return []
        found: Fetched = _answer(self._store.fetch.remote(self._generation, self._rank, rows))
        self.damaged += found.damaged
        nbytes = table.nbytes[rows]
        for number, name in enumerate(found.names):
            if total := int(nbytes[(found.origin == number) & (found.offset >= 0)].sum()):
                self.bytes_from[name] = self.bytes_from.get(name, 0) + total
        ends = (found.offset + nbytes).tolist()
        # The views hold the array: when the last of them is gone the store may use the memory for something else.
        array = np.frombuffer(self._memory(found.path, max(ends)), np.uint8)
        weakref.finalize(array, self._store.give_back.remote, self._generation, found.ticket).atexit = False
        view = memoryview(array)
        return [view[start:end] if start >= 0 else None for start, end in zip(found.offset.tolist(), ends)]

    def _memory(self, path: str, size: int) -> mmap.mmap:
        with self._lock:
            if self._map is None or len(self._map) < size:
                try:
                    with open(path, "rb") as file:
                        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                except OSError as error:
                    raise StorageError(f"the node's store gave up its memory: {error.strerror}", path) from None
            return self._map
