"""Chunks on their way into tensors: copied from the source's buffers, or read straight into a tensor's memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from elastic.errors import InternalError
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.component import Target
from elastic.snapshot.restore_plan import WINDOW_BYTES, Ints, RestorePlan, windows_of
from elastic.snapshot.tensor_layout import bits

THREADED_BYTES = 4 << 20
STRIDE_BYTES = 16 << 20
"""Bytes of chunks that are read while as many are copied, where not all need to be held at once. Little, so that the
same memory is used again and again: memory that is new costs its page faults, which is more than the read."""
LOCKED_CHUNK_BYTES = 64 << 10
"""Chunks of fewer bytes are copied without letting go of the interpreter lock: getting it back would take longer."""
_memmove_locked = ctypes.PyDLL(None).memmove
_memmove_locked.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_locked.restype = ctypes.c_void_p

_MEMORY = memoryview((ctypes.c_ubyte * (1 << 56)).from_address(0)).cast("B")
"""All memory of this process, for views of runs of it: 20,000 of those are made faster than so many arrays."""

Part = npt.NDArray[np.uint8] | memoryview


class ChunkSource(Protocol):
    """Where the bytes of chunks come from: node memory, a peer, durable storage."""

    def read(self, table: ChunkTable, rows: npt.NDArray[np.int64]) -> Sequence[Part]:
        """The verified bytes of these rows of ``table``, in their order.

        Raises CorruptSnapshot naming tensor, chunk and file if no good copy is left. The parts stay valid for as long
        as they are referred to.

        A source may also have ``read_into(table, rows, targets)``, which puts the bytes into ``targets`` and checks
        them there (on an error those hold anything); ``mapped(table, rows)``, which tells whose bytes lie in mapped
        memory and stay there; and ``announce(table, rows, late)``, which is told of everything else before it is read.
        """


class Transfer:
    """The chunks of a plan on their way into their targets, at most two windows of them held besides.

    Nothing live is touched before everything has been verified, as far as that fits: first what lies in memory that is
    mapped already is verified where it lies; then what goes into fresh memory is read, in windows, a chunk that is
    wanted whole straight into its place; then what goes into live memory. If that fits one window it is read and
    verified, and only then written. If not, ``run`` says so (``before_live``) and goes on window by window, like a read
    of fresh memory: to hold it all would break the byte budget, to read it twice would double the time.
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
        kinds: dict[str, torch.dtype] = {spec.dtype: getattr(torch, spec.dtype) for spec in table.specs}
        saved = {spec.name: kinds[spec.dtype] for spec in table.specs}
        self._dtypes = [saved[target.name] for target in targets]
        address = np.fromiter(map(_plain_address, targets, self._dtypes), np.int64, len(targets))
        self._plain = plan.flat & (address[plan.target] != 0)
        """Copies between runs of bytes."""
        self._destination = address[plan.target] + plan.target_byte
        whole = self._plain & (plan.nbytes == table.nbytes[plan.rows][plan.source])
        wanted_once = np.bincount(plan.source, minlength=len(plan.rows)) == 1
        self._whole = whole & wanted_once[plan.source] & hasattr(source, "read_into")
        """Copies that reading can make unnecessary."""
        self._first = np.concatenate(([0], np.cumsum(np.bincount(plan.source, minlength=len(plan.rows)))))

    def run(self, before_live: Callable[[], None]) -> None:
        """Fill all targets. ``before_live`` is called before the first byte of live memory changes. Raises what the
        source raises."""
        plan = self.plan
        is_live = np.fromiter((target.live for target in self.targets), bool, len(self.targets))
        live = np.zeros(len(plan.rows), bool)
        live[plan.source[is_live[plan.target]]] = True
        mapped = getattr(self.source, "mapped", None)
        here = np.zeros(len(plan.rows), bool) if mapped is None else mapped(self.table, plan.rows)
        if (announce := getattr(self.source, "announce", None)) is not None:
            announce(self.table, plan.rows[~here], live[~here])
        with ThreadPoolExecutor(1, "restore") as reader, ThreadPoolExecutor(1, "restore") as helper:
            held = self._fetch(np.flatnonzero(here), straight=False)
            self._stream(~here & ~live, reader, helper)
            last = np.flatnonzero(~here & live)
            if self.table.nbytes[self.plan.rows[last]].sum() > self.window_bytes and len(last) > 1:
                before_live()
                self._stream(~here & live, reader, helper)
            else:
                read = self._fetch(last, straight=False)
                before_live()
                self._put(read, helper)
            before_live()
            self._put(held, helper)

    def _stream(self, chosen: npt.NDArray[np.bool_], reader: Executor, helper: Executor) -> None:
        """Read the chosen ones of the plan's rows stride by stride, the next one while one is copied."""
        positions = np.flatnonzero(chosen)
        stride = min(self.window_bytes, STRIDE_BYTES)
        windows = [positions[cut] for cut in windows_of(self.table.nbytes[self.plan.rows[positions]], stride)]
        reading = [reader.submit(self._fetch, window, straight=True) for window in windows[:1]]
        for number in range(len(windows)):
            started = time.perf_counter()
            fetched = reading.pop().result()
            reading += [reader.submit(self._fetch, w, straight=True) for w in windows[number + 1 : number + 2]]
            self.waited_s += time.perf_counter() - started
            self._put(fetched, helper)
            del fetched  # and with it what the source keeps for it

    def _fetch(self, positions: Ints, straight: bool) -> _Fetched:
        """Read chunks, by their positions in the plan's rows; with ``straight`` into their targets where it can be."""
        table, plan = self.table, self.plan
        copies = self._copies_of(positions)
        if straight and (into := copies[self._whole[copies]]).size:
            ends = self._destination[into] + plan.nbytes[into]
            places = [_MEMORY[start:end] for start, end in zip(self._destination[into].tolist(), ends.tolist())]
            self.source.read_into(table, plan.rows[plan.source[into]], places)  # type: ignore[attr-defined]
            copies = copies[~self._whole[copies]]
            positions = np.unique(plan.source[copies])
        parts = self.source.read(table, plan.rows[positions]) if len(positions) else ()
        if len(parts) != len(positions):
            raise InternalError(f"{len(parts)} chunks came back where {len(positions)} were asked for")
        return _Fetched(positions, parts, copies)

    def _put(self, fetched: _Fetched, helper: Executor) -> None:
        """Copy what was read to its targets."""
        plan = self.plan
        arrays = [np.frombuffer(part, np.uint8) for part in fetched.parts]
        base = np.fromiter((a.__array_interface__["data"][0] for a in arrays), np.int64, len(arrays))
        part_of = np.searchsorted(fetched.positions, plan.source[fetched.copies])
        is_plain = self._plain[fetched.copies]
        plain = fetched.copies[is_plain]
        begin = base[part_of[is_plain]] + plan.source_byte[plain]
        columns = (self._destination[plain].tolist(), begin.tolist(), plan.nbytes[plain].tolist())
        total = int(plan.nbytes[plain].sum())
        if total < LOCKED_CHUNK_BYTES * len(plain):
            _move(_memmove_locked, *columns)
        elif self.threads > 1 and total > THREADED_BYTES:
            half = int(np.searchsorted(np.cumsum(plan.nbytes[plain]), total // 2))
            other = helper.submit(_move, ctypes.memmove, *(column[half:] for column in columns))
            _move(ctypes.memmove, *(column[:half] for column in columns))
            other.result()
        else:
            _move(ctypes.memmove, *columns)
        for copy, part in zip(fetched.copies[~is_plain].tolist(), part_of[~is_plain].tolist()):
            target = int(plan.target[copy])
            shape = self.table.box(int(plan.rows[plan.source[copy]])).shape
            _put_region(plan, copy, self.targets[target], arrays[part], shape, self._dtypes[target])

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


def _plain_address(target: Target, dtype: torch.dtype) -> int:
    """Where the memory of ``target`` begins if it takes a chunk's bytes as they are, else 0."""
    tensor = target.tensor
    return target.address if tensor.is_cpu and tensor.dtype is dtype and tensor.is_contiguous() else 0


def _move(
    move: Callable[[int, int, int], object], destinations: list[int], sources: list[int], sizes: list[int]
) -> None:
    for destination, source, size in zip(destinations, sources, sizes):
        move(destination, source, size)


def _put_region(
    plan: RestorePlan,
    row: int,
    target: Target,
    chunk: npt.NDArray[np.uint8],
    shape: tuple[int, ...],
    saved: torch.dtype,
) -> None:
    """One region by way of its elements: into strided memory, another dtype or another device."""
    dims = len(shape)
    extent = plan.extent[row, :dims].tolist()
    source = [slice(a, a + n) for a, n in zip(plan.source_offset[row, :dims].tolist(), extent)]
    place = [slice(a, a + n) for a, n in zip(plan.target_offset[row, :dims].tolist(), extent)]
    raw = chunk.reshape(*shape, saved.itemsize)[tuple(source)]
    region = torch.from_numpy(np.array(raw, order="C")).view(saved).view(extent)
    memory = target.tensor[tuple(place)] if dims else target.tensor
    with torch.no_grad():
        if memory.dtype == saved and not (memory.is_conj() or memory.is_neg()):
            bits(memory).copy_(bits(region))
        else:
            memory.copy_(region)
