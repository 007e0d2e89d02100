"""Chunks in a blob store: neighbours are read in one go, several ranges at once, each chunk checked as it arrives."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from elastic.errors import StorageError
from elastic.snapshot.checksum import algorithm_named
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.sources import Chunk, Rows, Take, verified
from elastic.storage.blob_store import BlobStore

GAP_BYTES = 64 << 10
"""Two chunks closer than this are read in one go."""
BUFFER_BYTES = BlobStore.range_bytes + (4 << 20)
"""Small enough that the allocator hands the same pages out again."""
KEPT_BUFFERS = 16
THREADS = 4

_UNUSED = sys.getrefcount([np.empty(0)][0]) + 1


class BlobCopy:
    """Chunks in a blob store. Reads ranges of packs, neighbours in one go, several at once, checked as they arrive.

    ``prefix`` is what the table's pack names are relative to (``SnapshotRef.snapshots``).
    """

    def __init__(self, store: BlobStore, prefix: str, threads: int = THREADS, name: str = "remote") -> None:
        self.name, self.damaged = name, list[str]()
        self._store, self._prefix, self._threads = store, prefix, threads
        self._buffers = _Buffers()
        self._gap = memoryview(bytearray(GAP_BYTES))
        """Where the bytes between two chunks go, which nobody wants."""

    def fetch(self, table: ChunkTable, rows: Rows) -> list[Chunk | None]:
        """See ``Copy.fetch``. Raises StorageError if the store itself does not answer."""
        found: list[Chunk | None] = [None] * len(rows)
        order, cuts = ranges(table, rows)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="read") as threads:
            chosen = [order[cut] for cut in cuts]
            for at, chunks in zip(chosen, threads.map(lambda at: self._read_range(table, rows[at]), chosen)):
                for i, chunk in zip(at.tolist(), chunks):
                    found[i] = chunk
        return found

    def deliver(self, table: ChunkTable, rows: Rows, take: Take) -> npt.NDArray[np.bool_]:
        """See ``DeliveringCopy.deliver``."""
        good = np.zeros(len(rows), bool)
        order, cuts = ranges(table, rows, self._store.range_bytes)

        def read(cut: slice) -> None:
            at = order[cut]
            found = self._read_range(table, rows[at], mapped=True)
            chunks = [chunk for chunk in found if chunk is not None]
            good[at] = [chunk is not None for chunk in found]
            take(at[good[at]], chunks)

        with ThreadPoolExecutor(self._threads, thread_name_prefix="read") as threads:
            list(threads.map(read, cuts))
        return good

    def fetch_into(self, table: ChunkTable, rows: Rows, targets: Sequence[memoryview]) -> npt.NDArray[np.bool_]:
        """See ``FillingCopy.fetch_into``. Neighbours in a pack are read in one go, wherever each of them goes."""
        good = np.zeros(len(rows), bool)
        order, cuts = ranges(table, rows, self._store.range_bytes)
        starts, ends = table.byte_start[rows], table.byte_start[rows] + table.nbytes[rows]
        kind = algorithm_named(table.algorithm)

        def read(cut: slice) -> None:
            at = order[cut]
            places = [targets[i] for i in at.tolist()]
            gaps = starts[at[1:]] - ends[at[:-1]]
            apart = len(gaps) and gaps.min() < 0  # one chunk twice, or one inside of another
            if apart or not self._fill(table, int(rows[at[-1]]), int(starts[at[0]]), self._with_gaps(places, gaps)):
                for i in at.tolist():  # cut short: what lies before the cut can still be had
                    self._fill(table, int(rows[i]), int(starts[i]), [targets[i]])
            found = np.frombuffer(b"".join(map(kind.digest, places)), np.uint8).reshape(len(at), -1)
            good[at] = (found == table.digest[rows[at]]).all(axis=1)
            self.damaged += [f"{table.describe(int(rows[i]))} ({self.name})" for i in at[~good[at]].tolist()]

        with ThreadPoolExecutor(self._threads, thread_name_prefix="read") as threads:
            list(threads.map(read, cuts))
        return good

    def _with_gaps(self, places: list[memoryview], gaps: Rows) -> list[memoryview]:
        """``places`` with somewhere to put what lies between two chunks."""
        if not gaps.any():
            return places
        found = places[:1]
        for gap, place in zip(gaps.tolist(), places[1:]):
            found += [self._gap[:gap], place] if gap else [place]
        return found

    def _read_range(self, table: ChunkTable, rows: Rows, mapped: bool = False) -> list[Chunk | None]:
        """Rows of one pack, in the order of their bytes; ``mapped`` if they are not kept."""
        starts, lengths = table.byte_start[rows], table.nbytes[rows]
        first, span = int(starts[0]), int((starts + lengths).max() - starts[0])
        buffer = self._map(table, int(rows[-1]), first, span) if mapped else None
        if buffer is None:
            buffer = self._buffers.take(span, first)
            if not self._fill(table, int(rows[-1]), first, [buffer]):
                if len(rows) == 1:
                    return [None]
                # Cut short: what lies before the cut can still be had.
                return [chunk for row in rows for chunk in self._read_range(table, np.array([row]))]
        ends = (starts - first + lengths).tolist()
        return verified(table, rows, [buffer[start:end] for start, end in zip((starts - first).tolist(), ends)], self)

    def _map(self, table: ChunkTable, row: int, start: int, nbytes: int) -> memoryview | None:
        """The bytes as they lie in memory, or None: then a read finds out what is wrong, if anything is."""
        try:
            return self._store.mapped(self._prefix + table.packs[table.pack_id[row]], start, nbytes)
        except (KeyError, StorageError):
            return None

    def _fill(self, table: ChunkTable, row: int, start: int, buffers: Sequence[memoryview]) -> bool:
        """Read from the pack of ``row``; False, with the reason noted, if it does not have so many bytes."""
        key = self._prefix + table.packs[table.pack_id[row]]
        try:
            self._store.scatter(key, start, buffers)
        except KeyError:
            self.damaged.append(f"{key} is not there")
            return False
        except StorageError:
            if self._store.exists(key) and self._store.size(key) >= start + sum(buffer.nbytes for buffer in buffers):
                raise
            self.damaged.append(f"{key} is cut short")
            return False
        return True


class _Buffers:
    """Buffers of one size that are handed out again once nobody refers to them: a fresh one costs its page faults,
    which is more than the read."""

    def __init__(self) -> None:
        self._made: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int, at: int) -> memoryview:
        """Room for the ``nbytes`` from ``at`` on in a file, kept for as long as the view or a part of it lives.

        It lies in its page as those lie in theirs: a disk can then fill it itself.
        """
        lead = at % mmap.PAGESIZE
        if lead + nbytes > BUFFER_BYTES or nbytes < BUFFER_BYTES // 16:
            return np.empty(nbytes, np.uint8).data
        with self._lock:
            for i in range(len(self._made)):
                # The list's reference and the call's own: every view of the buffer would add one.
                if sys.getrefcount(self._made[i]) == _UNUSED:
                    return self._made[i].data[lead : lead + nbytes]
            made = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), np.uint8)
            if len(self._made) < KEPT_BUFFERS:
                self._made.append(made)
            return made.data[lead : lead + nbytes]


def ranges(table: ChunkTable, rows: Rows, range_bytes: int = BlobStore.range_bytes) -> tuple[Rows, list[slice]]:
    """An order of ``rows`` by pack and byte, and slices of that order to be read in one go each."""
    starts, lengths, packs = table.byte_start[rows], table.nbytes[rows], table.pack_id[rows]
    order = np.lexsort(np.stack([starts, packs.astype(np.int64)]))
    if not len(order):
        return order, []
    starts, ends, packs = starts[order], (starts + lengths)[order], packs[order]
    new = np.concatenate(([True], (packs[1:] != packs[:-1]) | (starts[1:] > ends[:-1] + GAP_BYTES)))
    # Within each neighbourhood, cut where a multiple of range_bytes from its beginning is passed.
    heads = np.flatnonzero(new)
    origin = np.repeat(starts[heads], np.diff(np.append(heads, len(order))))
    part = (starts - origin) // range_bytes
    new[1:] |= part[1:] != part[:-1]
    edges = [*np.flatnonzero(new).tolist(), len(order)]
    return order, [slice(start, stop) for start, stop in zip(edges, edges[1:])]
