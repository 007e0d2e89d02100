"""Verified bytes of chunks, from the nearest place that has a good copy.

A *copy* is one place where chunks can be had: this node's arena, a peer, a blob store. It gives what it has, checked;
what it lacks or holds damaged it leaves out. A ``VerifiedSource`` asks its copies in turn and fails only when none
has a good one, naming tensor, chunk and file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol, Union, runtime_checkable

import numpy as np
import numpy.typing as npt

from elastic.errors import CorruptSnapshot
from elastic.snapshot.checksum import algorithm_named
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.seal import batches
from elastic.storage.blob_store import Buffer

Rows = npt.NDArray[np.int64]
Chunk = Union[memoryview, "npt.NDArray[np.uint8]"]
Serve = Callable[[str, Rows, Rows], Sequence[Buffer] | None]
"""(pack, byte_start, nbytes) to the ranges of that pack, or None where it is not held; see ``NodeTier.serve``."""


class Copy(Protocol):
    """One place where chunks can be had. ``damaged`` collects, in words, what was found bad."""

    name: str
    damaged: list[str]

    def fetch(self, table: ChunkTable, rows: Rows) -> list[Chunk | None]:
        """Per row the verified bytes, or None where this copy has none that are good."""
        ...


@runtime_checkable
class FillingCopy(Copy, Protocol):
    """A copy that can put bytes where they are wanted, without a copy in between."""

    def fetch_into(self, table: ChunkTable, rows: Rows, targets: Sequence[memoryview]) -> npt.NDArray[np.bool_]:
        """As ``fetch``, into ``targets``, one for each row, of its length. False where the chunk is not good; its
        target then holds anything."""
        ...


Take = Callable[[Rows, Sequence[Chunk]], None]
"""(numbers, parts): verified bytes of some of the rows that were asked for, valid until the call returns."""


@runtime_checkable
class DeliveringCopy(Copy, Protocol):
    """A copy that hands out bytes as they come, while they are still near: nothing is held, nothing copied between."""

    def deliver(self, table: ChunkTable, rows: Rows, take: Take) -> npt.NDArray[np.bool_]:
        """``take`` is called, from several threads at once, with the rows that are good, a few at a time, by their
        numbers in ``rows``, ascending if those are in the order of their packs and bytes. False where a chunk is not
        good."""
        ...


@runtime_checkable
class PlanningCopy(Copy, Protocol):
    """A copy that wants to know beforehand what will be read of it, and that stands for several places."""

    bytes_from: dict[str, int]

    def announce(self, table: ChunkTable, rows: Rows, late: npt.NDArray[np.bool_]) -> None:
        """All rows that will be asked for, unless another copy turns out to be bad; those of ``late`` last."""
        ...


class VerifiedSource:
    """Reads chunks from the first copy that has them good."""

    def __init__(self, copies: Sequence[Copy], window_bytes: int | None = None) -> None:
        self.copies = tuple(copies)
        self.window_bytes = window_bytes
        """Most bytes to read in one call, where the copies have a budget."""
        self._bytes: dict[str, int] = {copy.name: 0 for copy in copies}
        self._lock = threading.Lock()

    @property
    def bytes_from(self) -> dict[str, int]:
        """Bytes read so far, by place."""
        found = dict(self._bytes)
        for copy in self.copies:
            if isinstance(copy, PlanningCopy):  # it reads for others too and knows from where
                found.pop(copy.name, None)
                for name, nbytes in copy.bytes_from.items():
                    found[name] = found.get(name, 0) + nbytes
        return found

    @property
    def damaged(self) -> list[str]:
        """Every damaged chunk met so far, in words."""
        return [text for copy in self.copies for text in copy.damaged]

    def read(self, table: ChunkTable, rows: npt.NDArray[Any]) -> list[Chunk]:
        """The verified bytes of these rows, in order. Raises CorruptSnapshot if no copy of a chunk is good."""
        return self._read(table, np.asarray(rows, np.int64), self.copies)

    def _read(self, table: ChunkTable, wanted: Rows, copies: Sequence[Copy]) -> list[Chunk]:
        found: list[Chunk | None] = [None] * len(wanted)
        left = np.arange(len(wanted))
        for copy in copies:
            if not len(left):
                break
            got = copy.fetch(table, wanted[left])
            count = 0
            for i, chunk in zip(left.tolist(), got):
                if chunk is not None:
                    found[i] = chunk
                    count += chunk.nbytes
            self._count(copy, count)
            left = left[[chunk is None for chunk in got]]
        if len(left):
            raise self._no_good_copy(table, wanted[left])
        return found  # type: ignore[return-value]

    def mapped(self, table: ChunkTable, rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which rows lie in memory that is mapped already: reading those verifies them and costs no memory."""
        first = self.copies[0] if self.copies else None
        if not isinstance(first, ServedCopy) or not first.mapped:
            return np.zeros(len(rows), bool)
        return first.holds(table, np.asarray(rows, np.int64))

    def announce(self, table: ChunkTable, rows: npt.NDArray[Any], late: npt.NDArray[np.bool_]) -> None:
        """Say what will be read, all of it, those of ``late`` last, to the copies that can make use of it."""
        for copy in self.copies:
            if isinstance(copy, PlanningCopy):
                copy.announce(table, np.asarray(rows, np.int64), late)

    @property
    def delivers(self) -> bool:
        """Whether ``deliver`` can be called."""
        return bool(self.copies) and isinstance(self.copies[0], DeliveringCopy)

    def deliver(self, table: ChunkTable, rows: npt.NDArray[Any], take: Take) -> None:
        """Each row to ``take`` once, as it comes; see ``DeliveringCopy.deliver``. Raises CorruptSnapshot if no copy of
        a chunk is good."""
        wanted, first = np.asarray(rows, np.int64), self.copies[0]
        assert isinstance(first, DeliveringCopy)
        good = first.deliver(table, wanted, take)
        self._count(first, int(table.nbytes[wanted[good]].sum()))
        if len(lost := np.flatnonzero(~good)):
            take(lost, self._read(table, wanted[lost], self.copies[1:]))

    def fill(self, table: ChunkTable, rows: Rows, targets: Sequence[memoryview]) -> npt.NDArray[np.int8]:
        """As ``read``, with the bytes of each row in its target, of its length. The place in ``copies`` that each row
        came from; -1 where no copy was good: the target then holds anything."""
        origin = np.full(len(rows), -1, np.int8)
        left = np.arange(len(rows))
        for number, copy in enumerate(self.copies):
            if not len(left):
                break
            if isinstance(copy, FillingCopy):
                good = copy.fetch_into(table, rows[left], [targets[i] for i in left.tolist()])
            else:
                chunks = copy.fetch(table, rows[left])
                good = np.array([chunk is not None for chunk in chunks], bool)
                for i, chunk in zip(left.tolist(), chunks):
                    if chunk is not None:
                        np.copyto(np.frombuffer(targets[i], np.uint8), np.frombuffer(chunk, np.uint8))
            origin[left[good]] = number
            self._count(copy, int(table.nbytes[rows[left[good]]].sum()))
            left = left[~good]
        return origin

    def _count(self, copy: Copy, nbytes: int) -> None:
        with self._lock:
            self._bytes[copy.name] = self._bytes.get(copy.name, 0) + nbytes

    def _no_good_copy(self, table: ChunkTable, rows: Rows) -> CorruptSnapshot:
        places = ", ".join(copy.name for copy in self.copies) or "nowhere"
        return CorruptSnapshot(
            f"no good copy is left of {table.describe(int(rows[0]))}"
            + (f" and {len(rows) - 1} more chunks" if len(rows) > 1 else ""),
            f"looked in: {places}",
            "restore from an older snapshot",
        )


class ServedCopy:
    """Chunks of the node tier, here or on a peer, through a function that serves ranges of a pack."""

    def __init__(self, name: str, serve: Serve, threads: int = 2, mapped: bool = False) -> None:
        self.name, self.damaged, self.mapped = name, list[str](), mapped
        """``mapped``: what is served lies in memory that this process has mapped, and stays there."""
        self._serve, self._threads = serve, threads

    def holds(self, table: ChunkTable, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows lie in packs that are served here."""
        held = np.zeros(len(table.packs), bool)
        none = np.zeros(0, np.int64)
        for pack in np.unique(table.pack_id[rows]).tolist():
            held[pack] = self._serve(table.packs[pack], none, none) is not None
        return held[table.pack_id[rows]]

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
    digests = np.frombuffer(b"".join(map(kind.digest, chunks)), np.uint8).reshape(len(chunks), kind.digest_bytes)
    found: list[Chunk | None] = list(chunks)
    for i in np.flatnonzero((digests != table.digest[rows]).any(axis=1)).tolist():
        copy.damaged.append(f"{table.describe(int(rows[i]))} ({copy.name})")
        found[i] = None
    return found
