"""Chunks on their way into tensors: copied from the source's buffers, or read straight into a tensor's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from elastic.errors import InternalError
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.component import Target
from elastic.snapshot.restore_plan import RestorePlan
from elastic.snapshot.tensor_layout import bits

DIRECT_BYTES = 128 << 10
"""Chunks of at least so many bytes are worth reading straight into their target."""
THREADED_BYTES = 4 << 20
LOCKED_CHUNK_BYTES = 64 << 10
"""Chunks of fewer bytes are copied without letting go of the interpreter lock: getting it back would take longer."""
_memmove_locked = ctypes.PyDLL(None).memmove
_memmove_locked.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_locked.restype = ctypes.c_void_p

Part = npt.NDArray[np.uint8] | memoryview


class ChunkSource(Protocol):
    """Where the bytes of chunks come from: node memory, a peer, durable storage."""

    def read(self, table: ChunkTable, rows: npt.NDArray[np.int64]) -> Sequence[Part]:
        """The verified bytes of these rows of ``table``, in their order.

        Raises CorruptSnapshot naming tensor, chunk and file if no good copy is left. The parts stay valid until the
        call after the next one: while one window is copied, the next is read.

        A source may also have ``read_into(table, rows, targets)``, which puts the bytes into ``targets`` and checks
        them there; on an error those hold anything.
        """


class Transfer:
    """The chunks of a plan on their way into their targets.

    A chunk that is wanted whole, by a target that takes its bytes as they are, may be read straight into it
    (``read_into``), if everything does not fit one window anyway; all others are read, then copied.
    """

    def __init__(
        self, table: ChunkTable, source: ChunkSource, plan: RestorePlan, targets: Sequence[Target], threads: int
    ) -> None:
        self.table, self.source, self.plan, self.targets = table, source, plan, targets
        self.threads = threads
        self.saved = {spec.name: spec for spec in table.specs}
        address = np.zeros(len(targets), np.int64)
        for number, target in enumerate(targets):
            tensor = target.tensor
            if tensor.device.type == "cpu" and tensor.is_contiguous() and _same_dtype(tensor, self._dtype(target)):
                address[number] = tensor.data_ptr()
        self.plain = plan.flat & (address[plan.target] != 0)
        """Copies between runs of bytes."""
        self.destination = address[plan.target] + plan.target_byte
        whole = self.plain & (plan.nbytes == table.nbytes[plan.rows][plan.source]) & (plan.nbytes >= DIRECT_BYTES)
        wanted_once = np.bincount(plan.source, minlength=len(plan.rows)) == 1
        has_direct = len(plan.windows) > 1 and hasattr(source, "read_into")
        self.direct = whole & wanted_once[plan.source] & has_direct
        """Copies that reading makes unnecessary."""

    def fetch(self, number: int) -> dict[int, Part]:
        """Read window ``number``. Chunks by their position in the plan's rows, without those that went straight in."""
        window, copies = self.plan.windows[number], self.plan.copies[number]
        straight = np.flatnonzero(self.direct[copies]) + copies.start
        if len(straight):
            places = [
                memoryview((ctypes.c_char * size).from_address(address)).cast("B")
                for address, size in zip(self.destination[straight].tolist(), self.plan.nbytes[straight].tolist())
            ]
            rows = self.plan.rows[self.plan.source[straight]]
            self.source.read_into(self.table, rows, places)  # type: ignore[attr-defined]
        left = np.arange(window.start, window.stop)
        left = left[~np.isin(left, self.plan.source[straight])] if len(straight) else left
        parts = self.source.read(self.table, self.plan.rows[left]) if len(left) else ()
        if len(parts) != len(left):
            raise InternalError(f"{len(parts)} chunks came back where {len(left)} were asked for")
        return dict(zip(left.tolist(), parts))

    def put(self, number: int, parts: Mapping[int, Part], helper: ThreadPoolExecutor) -> None:
        """Copy what was read of window ``number`` to its targets."""
        plan, copies = self.plan, self.plan.copies[number]
        arrays = {position: np.frombuffer(part, np.uint8) for position, part in parts.items()}
        base = np.zeros(self.plan.windows[number].stop - self.plan.windows[number].start, np.int64)
        first = self.plan.windows[number].start
        base[np.fromiter(arrays, np.int64, len(arrays)) - first] = np.fromiter(
            (array.__array_interface__["data"][0] for array in arrays.values()), np.int64, len(arrays)
        )
        plain = np.flatnonzero(self.plain[copies] & ~self.direct[copies]) + copies.start
        begin = base[plan.source[plain] - first] + plan.source_byte[plain]
        columns = (self.destination[plain].tolist(), begin.tolist(), plan.nbytes[plain].tolist())
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
        for copy in (np.flatnonzero(~self.plain[copies]) + copies.start).tolist():
            target, position = self.targets[int(plan.target[copy])], int(plan.source[copy])
            shape = self.table.box(int(plan.rows[position])).shape
            _put_region(plan, copy, target, arrays[position], shape, self._dtype(target))

    def _dtype(self, target: Target) -> str:
        return self.saved[target.name].dtype


def _move(
    move: Callable[[int, int, int], object], destinations: list[int], sources: list[int], sizes: list[int]
) -> None:
    for destination, source, size in zip(destinations, sources, sizes):
        move(destination, source, size)


def _put_region(
    plan: RestorePlan, row: int, target: Target, chunk: npt.NDArray[np.uint8], shape: tuple[int, ...], dtype: str
) -> None:
    """One region by way of its elements: into strided memory, another dtype or another device."""
    dims = len(shape)
    extent = plan.extent[row, :dims].tolist()
    source = [slice(a, a + n) for a, n in zip(plan.source_offset[row, :dims].tolist(), extent)]
    place = [slice(a, a + n) for a, n in zip(plan.target_offset[row, :dims].tolist(), extent)]
    saved: torch.dtype = getattr(torch, dtype)
    raw = chunk.reshape(*shape, saved.itemsize)[tuple(source)]
    region = torch.from_numpy(np.array(raw, order="C")).view(saved).view(extent)
    memory = target.tensor[tuple(place)] if dims else target.tensor
    with torch.no_grad():
        if _same_dtype(memory, dtype) and not (memory.is_conj() or memory.is_neg()):
            bits(memory).copy_(bits(region))
        else:
            memory.copy_(region)


def _same_dtype(tensor: torch.Tensor, dtype: str) -> bool:
    return str(tensor.dtype) == f"torch.{dtype}"
