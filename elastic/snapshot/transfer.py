"""Chunks on their way into tensors: verified, then copied, each to all the places that want some of it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from elastic.errors import InternalError
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.component import Target
from elastic.snapshot.memory_copy import Pieces, addresses_of, parts_for
from elastic.snapshot.memory_copy import copy as copy_pieces
from elastic.snapshot.restore_plan import WINDOW_BYTES, Ints, RestorePlan, windows_of
from elastic.snapshot.tensor_layout import bits

STRIDE_BYTES = 16 << 20
"""Bytes of chunks that are read while as many are copied, where not all need to be held at once. Little, so that the
same memory is used again and again: memory that is new costs its page faults, which is more than the read."""
_MEMORY = memoryview((ctypes.c_ubyte * (1 << 56)).from_address(0)).cast("B")
"""All memory of this process, for views of runs of it: 20,000 of those are made faster than so many arrays."""

Part = npt.NDArray[np.uint8] | memoryview


class ChunkSource(Protocol):
    """Where the bytes of chunks come from: node memory, a peer, durable storage."""

    def read(self, table: ChunkTable, rows: npt.NDArray[np.int64]) -> Sequence[Part]:
        """The verified bytes of these rows of ``table``, in their order.

        Raises CorruptSnapshot naming tensor, chunk and file if no good copy is left. The parts stay valid for as long
        as they are referred to.

        A source may also have ``deliver(table, rows, take)``, which hands out the bytes as they come, and says in
        ``delivers`` whether it can; ``mapped(table, rows)``, which tells whose bytes lie in mapped memory and stay
        there; and ``announce(table, rows, late)``, which is told of everything else before it is read.
        """


class Transfer:
    """The chunks of a plan on their way into their targets, at most two windows of them held besides.

    Nothing live is touched before everything has been verified, as far as that fits: first what lies in memory that is
    mapped already is verified where it lies; then what goes into fresh memory is read, in windows or as it comes; then
    what goes into live memory. If that fits one window it is read and verified, and only then written. If not, ``run``
    says so (``before_live``) and goes on like a read of fresh memory: to hold it all would break the byte budget, to
    read it twice would double the time. A chunk is in any case verified before it is copied anywhere.
    """

    def __init__(
        self,
        table: ChunkTable,
        source: ChunkSource,
        plan: RestorePlan,
        targets: Sequence[Target],
        threads: int,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.table, self.source, self.plan, self.targets = table, source, plan, targets
        self.threads = threads
        self.window_bytes = min(window_bytes, getattr(source, "window_bytes", None) or window_bytes)
        self.waited_s = 0.0
        """Seconds spent waiting for chunks."""
        address = np.fromiter(map(attrgetter("address"), targets), np.int64, len(targets))
        is_plain = np.fromiter(map(attrgetter("plain"), targets), bool, len(targets))
        self._plain = plan.flat & is_plain[plan.target]
        """Copies between runs of bytes."""
        self._destination = address[plan.target] + plan.target_byte
        self._first = np.concatenate(([0], np.cumsum(np.bincount(plan.source, minlength=len(plan.rows)))))

    def run(self, before_live: Callable[[], None]) -> None:
        """Fill all targets. ``before_live`` is called before the first byte of live memory changes. Raises what the
        source raises."""
        plan = self.plan
        is_live = np.fromiter(map(attrgetter("live"), self.targets), bool, len(self.targets))
        live = np.zeros(len(plan.rows), bool)
        live[plan.source[is_live[plan.target]]] = True
        mapped = getattr(self.source, "mapped", None)
        here = np.zeros(len(plan.rows), bool) if mapped is None else mapped(self.table, plan.rows)
        if (announce := getattr(self.source, "announce", None)) is not None:
            announce(self.table, plan.rows[~here], live[~here])
        with ThreadPoolExecutor(1, "restore") as reader, ThreadPoolExecutor(1, "restore") as helper:
            held = self._fetch(np.flatnonzero(here))
            self._stream(~here & ~live, reader, helper)
            last = np.flatnonzero(~here & live)
            if self.table.nbytes[self.plan.rows[last]].sum() > self.window_bytes and len(last) > 1:
                before_live()
                self._stream(~here & live, reader, helper)
            else:
                read = self._fetch(last)
                before_live()
                self._put(read, helper)
            before_live()
            self._put(held, helper)

    def _stream(self, chosen: npt.NDArray[np.bool_], reader: Executor, helper: Executor) -> None:
        """Read the chosen ones of the plan's rows stride by stride, the next one while one is copied."""
        positions = np.flatnonzero(chosen)
        if getattr(self.source, "delivers", False):
            return self._deliver(positions)
        stride = min(self.window_bytes, STRIDE_BYTES)
        windows = [positions[cut] for cut in windows_of(self.table.nbytes[self.plan.rows[positions]], stride)]
        reading = [reader.submit(self._fetch, window) for window in windows[:1]]
        for number in range(len(windows)):
            started = time.perf_counter()
            fetched = reading.pop().result()
            reading += [reader.submit(self._fetch, w) for w in windows[number + 1 : number + 2]]
            self.waited_s += time.perf_counter() - started
            self._put(fetched, helper)
            del fetched  # and with it what the source keeps for it

    def _deliver(self, positions: Ints) -> None:
        """As ``_stream``, each chunk as soon as it has come and was verified."""
        started = time.perf_counter()

        def take(numbers: Ints, parts: Sequence[Part]) -> None:
            chosen = positions[numbers]
            self._put(_Fetched(chosen, parts, self._copies_of(chosen)))

        self.source.deliver(self.table, self.plan.rows[positions], take)  # type: ignore[attr-defined]
        self.waited_s += time.perf_counter() - started

    def _fetch(self, positions: Ints) -> _Fetched:
        """Read chunks, by their positions in the plan's rows."""
        parts = self.source.read(self.table, self.plan.rows[positions]) if len(positions) else ()
        if len(parts) != len(positions):
            raise InternalError(f"{len(parts)} chunks came back where {len(positions)} were asked for")
        return _Fetched(positions, parts, self._copies_of(positions))

    def _put(self, fetched: _Fetched, helper: Executor | None = None) -> None:
        """Copy what was read to its targets, with the help of another thread if there is one."""
        plan = self.plan
        base = addresses_of(fetched.parts)
        part_of = np.searchsorted(fetched.positions, plan.source[fetched.copies])
        is_plain = self._plain[fetched.copies]
        plain = fetched.copies[is_plain]
        begin = base[part_of[is_plain]] + plan.source_byte[plain]
        pieces = Pieces(self._destination[plain], begin, plan.nbytes[plain])
        copy_pieces([pieces] if helper is None else parts_for(pieces, min(self.threads, 2)), 0, helper)
        for copy, part in zip(fetched.copies[~is_plain].tolist(), part_of[~is_plain].tolist()):
            shape = self.table.box(int(plan.rows[plan.source[copy]])).shape
            _put_region(
                plan, copy, self.targets[int(plan.target[copy])], np.frombuffer(fetched.parts[part], np.uint8), shape
            )

    def _copies_of(self, positions: Ints) -> Ints:
        """The copies out of these rows of the plan, in order."""
        count = self._first[positions + 1] - self._first[positions]
        before = np.cumsum(count) - count
        return np.repeat(self._first[positions] - before, count) + np.arange(int(count.sum()))


@dataclass(frozen=True, slots=True, eq=False)
class _Fetched:
    """Verified chunks by their positions in the plan's rows, and the copies to be made out of them."""

    positions: Ints
    parts: Sequence[Part]
    copies: Ints


def _put_region(
    plan: RestorePlan,
    row: int,
    target: Target,
    chunk: npt.NDArray[np.uint8],
    shape: tuple[int, ...],
) -> None:
    """One region by way of its elements: out of or into something strided, another dtype, another device."""
    saved: torch.dtype = getattr(torch, target.spec.dtype)
    dims = len(shape)
    extent = plan.extent[row, :dims].tolist()
    source = [slice(a, a + n) for a, n in zip(plan.source_offset[row, :dims].tolist(), extent)]
    place = [slice(a, a + n) for a, n in zip(plan.target_offset[row, :dims].tolist(), extent)]
    raw = chunk.reshape(*shape, saved.itemsize)[tuple(source)]
    if target.plain:
        memory = np.frombuffer(_MEMORY[target.address : target.address + target.tensor.nbytes], np.uint8)
        np.copyto(memory.reshape(*target.tensor.shape, saved.itemsize)[tuple(place)], raw)
        return
    region = torch.from_numpy(np.array(raw, order="C")).view(saved).view(extent)
    inside = target.tensor[tuple(place)] if dims else target.tensor
    with torch.no_grad():
        if inside.dtype == saved and not (inside.is_conj() or inside.is_neg()):
            bits(inside).copy_(bits(region))
        else:
            inside.copy_(region)
