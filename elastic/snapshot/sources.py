"""Verified bytes of chunks, from the nearest place that has a good copy.

A *copy* is one place where chunks can be had: this node's arena, a peer, a blob store. It gives what it has, checked;
what it lacks or holds damaged it leaves out. A ``VerifiedSource`` asks its copies in turn and fails only when none
has a good one, naming tensor, chunk and file.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol, Union

import numpy as np
import numpy.typing as npt

from elastic.errors import CorruptSnapshot, StorageError
from elastic.snapshot.checksum import algorithm_named
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.seal import batches
from elastic.storage.blob_store import BlobStore, Buffer

Rows = npt.NDArray[np.int64]
Chunk = Union[memoryview, "npt.NDArray[np.uint8]"]
Serve = Callable[[str, Rows, Rows], Sequence[Buffer] | None]
"""(pack, byte_start, nbytes) to the ranges of that pack, or None where it is not held; see ``NodeTier.serve``."""

RANGE_BYTES = 8 << 20
"""Most bytes of one read: small enough that the allocator hands the same pages out again."""
GAP_BYTES = 64 << 10
"""Two chunks closer than this are read in one go."""
BUFFER_BYTES = RANGE_BYTES + (4 << 20)
KEPT_BUFFERS = 16
DIRECT_BYTES = 128 << 10
"""From here on a chunk is read straight to where it is wanted: a call costs less than a copy."""
THREADS = 4

_UNUSED = sys.getrefcount([np.empty(0)][0]) + 1


class Copy(Protocol):
    """One place where chunks can be had. ``damaged`` collects, in words, what was found bad."""

    name: str
    damaged: list[str]

    def fetch(self, table: ChunkTable, rows: Rows) -> list[Chunk | None]:
        """Per row the verified bytes, or None where this copy has none that are good."""
        ...


class VerifiedSource:
    """Reads chunks from the first copy that has them good. ``bytes_from`` counts by name of the copy."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.copies = tuple(copies)
        self.bytes_from: dict[str, int] = {copy.name: 0 for copy in copies}
        self._lock = threading.Lock()

    @property
    def damaged(self) -> list[str]:
        """Every damaged chunk met so far, in words."""
        return [text for copy in self.copies for text in copy.damaged]

    def read(self, table: ChunkTable, rows: npt.NDArray[Any]) -> list[Chunk]:
        """The verified bytes of these rows, in order. Raises CorruptSnapshot if no copy of a chunk is good."""
        wanted = np.asarray(rows, np.int64)
        found: list[Chunk | None] = [None] * len(wanted)
        left = np.arange(len(wanted))
        for copy in self.copies:
            if not len(left):
                break
            got = copy.fetch(table, wanted[left])
            count = 0
            for i, chunk in zip(left.tolist(), got):
                if chunk is not None:
                    found[i] = chunk
                    count += chunk.nbytes
            with self._lock:
                self.bytes_from[copy.name] += count
            left = left[[chunk is None for chunk in got]]
        if len(left):
            places = ", ".join(copy.name for copy in self.copies) or "nowhere"
            raise CorruptSnapshot(
                f"no good copy is left of {table.describe(int(wanted[left[0]]))}"
                + (f" and {len(left) - 1} more chunks" if len(left) > 1 else ""),
                f"looked in: {places}",
                "restore from an older snapshot",
            )
        return found  # type: ignore[return-value]

    def read_into(self, table: ChunkTable, rows: npt.NDArray[Any], targets: Sequence[memoryview]) -> None:
        """As ``read``, with the bytes of each row in its target. Saves a copy where the first place can read straight
        into memory; a chunk is then checked after it has arrived, so give memory that nothing lives on yet: after an
        error it holds anything."""
        wanted = np.asarray(rows, np.int64)
        left = np.arange(len(wanted))
        first = self.copies[0] if self.copies else None
        if isinstance(first, BlobCopy):
            good = np.array(first.fetch_into(table, wanted, targets), bool)
            with self._lock:
                self.bytes_from[first.name] += int(table.nbytes[wanted[good]].sum())
            left = np.flatnonzero(~good)
        for i, chunk in zip(left.tolist(), self.read(table, wanted[left]) if len(left) else ()):
            np.copyto(np.frombuffer(targets[i], np.uint8), np.frombuffer(chunk, np.uint8))


class ServedCopy:
    """Chunks of the node tier, here or on a peer, through a function that serves ranges of a pack."""

    def __init__(self, name: str, serve: Serve, threads: int = 2) -> None:
        self.name, self.damaged = name, list[str]()
        self._serve, self._threads = serve, threads

    def fetch(self, table: ChunkTable, rows: Rows) -> list[Chunk | None]:
        """See ``Copy.fetch``."""
        found: list[Chunk | None] = [None] * len(rows)
        packs = table.pack_id[rows]
        with ThreadPoolExecutor(self._threads) as threads:
            for pack in np.unique(packs).tolist():
                at = np.flatnonzero(packs == pack)
                chosen = rows[at]
                served = self._serve(table.packs[pack], table.byte_start[chosen], table.nbytes[chosen])
                if served is None:
                    continue
                for cut, part in self._checked(table, chosen, served, threads):
                    for i, chunk in zip(at[cut].tolist(), part):
                        found[i] = chunk
        return found

    def _checked(
        self, table: ChunkTable, rows: Rows, served: Sequence[Buffer], threads: Executor
    ) -> Iterator[tuple[slice, list[Chunk | None]]]:
        def check(cut: slice) -> list[Chunk | None]:
            return verified(table, rows[cut], [memoryview(chunk) for chunk in served[cut]], self)

        cuts = batches(table.nbytes[rows])
        return zip(cuts, threads.map(check, cuts))


class BlobCopy:
    """Chunks in a blob store. Reads ranges of packs, neighbours in one go, several at once, checked as they arrive.

    ``prefix`` is what the table's pack names are relative to (``SnapshotRef.snapshots``).
    """

    def __init__(self, store: BlobStore, prefix: str, threads: int = THREADS, name: str = "remote") -> None:
        self.name, self.damaged = name, list[str]()
        self._store, self._prefix, self._threads = store, prefix, threads
        self._buffers = _Buffers()

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

    def fetch_into(self, table: ChunkTable, rows: Rows, targets: Sequence[memoryview]) -> list[bool]:
        """As ``fetch``, straight into ``targets`` (one for each row, of its length) where that saves a copy. False
        where the chunk is not good; its target then holds anything."""
        good = np.zeros(len(rows), bool)
        large = np.flatnonzero(table.nbytes[rows] >= DIRECT_BYTES)

        def read(at: Rows) -> None:
            for i in at.tolist():
                row = int(rows[i])
                if self._fill(table, row, int(table.byte_start[row]), targets[i]):
                    good[i] = verified(table, rows[i : i + 1], [targets[i]], self)[0] is not None

        with ThreadPoolExecutor(self._threads, thread_name_prefix="read") as threads:
            list(threads.map(read, [large[cut] for cut in batches(table.nbytes[rows[large]])]))
        small = np.flatnonzero(table.nbytes[rows] < DIRECT_BYTES)
        for i, chunk in zip(small.tolist(), self.fetch(table, rows[small])):
            if chunk is not None:
                np.copyto(np.frombuffer(targets[i], np.uint8), np.frombuffer(chunk, np.uint8))
                good[i] = True
        return [bool(one) for one in good]

    def _read_range(self, table: ChunkTable, rows: Rows) -> list[Chunk | None]:
        """Rows of one pack, in the order of their bytes."""
        starts, lengths = table.byte_start[rows], table.nbytes[rows]
        first = int(starts[0])
        buffer = self._buffers.take(int((starts + lengths).max()) - first)
        if not self._fill(table, int(rows[-1]), first, buffer):
            if len(rows) == 1:
                return [None]
            # Cut short: what lies before the cut can still be had.
            return [chunk for row in rows for chunk in self._read_range(table, np.array([row]))]
        ends = (starts - first + lengths).tolist()
        return verified(table, rows, [buffer[start:end] for start, end in zip((starts - first).tolist(), ends)], self)

    def _fill(self, table: ChunkTable, row: int, start: int, buffer: memoryview) -> bool:
        key = self._prefix + table.packs[table.pack_id[row]]
        try:
            self._store.read_into(key, start, buffer)
        except KeyError:
            self.damaged.append(f"{key} is not there")
            return False
        except StorageError:
            if self._store.exists(key) and self._store.size(key) >= start + buffer.nbytes:
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

    def take(self, nbytes: int) -> memoryview:
        """Room for ``nbytes``, kept for as long as the view or a part of it lives."""
        if nbytes > BUFFER_BYTES or nbytes < BUFFER_BYTES // 8:
            return np.empty(nbytes, np.uint8).data
        with self._lock:
            for i in range(len(self._made)):
                # The list's reference and the call's own: every view of the buffer would add one.
                if sys.getrefcount(self._made[i]) == _UNUSED:
                    return self._made[i].data[:nbytes]
            made = np.empty(BUFFER_BYTES, np.uint8)
            if len(self._made) < KEPT_BUFFERS:
                self._made.append(made)
            return made.data[:nbytes]


class TwinCopy:
    """The chunks of one tier, found by checksum in the snapshot of another: the durable twin of a node snapshot."""

    def __init__(self, twin: ChunkTable, copy: Copy) -> None:
        self.name, self.damaged = copy.name, copy.damaged
        self._twin, self._copy = twin, copy
        self._row_of = {digest.tobytes(): row for row, digest in enumerate(twin.digest)}

    def fetch(self, table: ChunkTable, rows: Rows) -> list[Chunk | None]:
        """See ``Copy.fetch``."""
        found: list[Chunk | None] = [None] * len(rows)
        if table.algorithm != self._twin.algorithm:
            return found
        twins = [self._row_of.get(table.digest[row].tobytes(), -1) for row in rows]
        at = [i for i, row in enumerate(twins) if row >= 0 and self._twin.nbytes[row] == table.nbytes[rows[i]]]
        chunks = self._copy.fetch(self._twin, np.array([twins[i] for i in at], np.int64))
        for i, chunk in zip(at, chunks):
            found[i] = chunk
        return found


def verified(table: ChunkTable, rows: Rows, chunks: Sequence[memoryview], copy: Copy) -> list[Chunk | None]:
    """The chunks that have the checksums of their rows; None in place of the others, which ``copy`` records."""
    kind = algorithm_named(table.algorithm)
    wanted = table.digest[rows].tobytes()
    width, good = kind.digest_bytes, list[Chunk | None]()
    lengths = table.nbytes[rows].tolist()
    for i, chunk in enumerate(chunks):
        if chunk.nbytes == lengths[i] and kind.digest(chunk) == wanted[i * width : (i + 1) * width]:
            good.append(chunk)
        else:
            copy.damaged.append(f"{table.describe(int(rows[i]))} ({copy.name})")
            good.append(None)
    return good


def ranges(table: ChunkTable, rows: Rows) -> tuple[Rows, list[slice]]:
    """An order of ``rows`` by pack and byte, and slices of that order to be read in one go each."""
    starts, lengths, packs = table.byte_start[rows], table.nbytes[rows], table.pack_id[rows]
    order = np.lexsort(np.stack([starts, packs.astype(np.int64)]))
    if not len(order):
        return order, []
    starts, ends, packs = starts[order], (starts + lengths)[order], packs[order]
    new = np.concatenate(([True], (packs[1:] != packs[:-1]) | (starts[1:] > ends[:-1] + GAP_BYTES)))
    # Within each neighbourhood, cut where a multiple of RANGE_BYTES from its beginning is passed.
    heads = np.flatnonzero(new)
    origin = np.repeat(starts[heads], np.diff(np.append(heads, len(order))))
    part = (starts - origin) // RANGE_BYTES
    new[1:] |= part[1:] != part[:-1]
    edges = [*np.flatnonzero(new).tolist(), len(order)]
    return order, [slice(start, stop) for start, stop in zip(edges, edges[1:])]
