"""The bytes of boxes, one after another, in a memory that does not grow with the tensors. Without torch.

What walks through whole tensors (an export, a comparison) names the boxes in the order in which it wants them, and gets
each as verified bytes, however many ranks wrote the snapshot and however they had cut it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from elastic.protocol.shares import ALIGNMENT_BYTES
from elastic.snapshot.chunk_table import ChunkTable, Ints
from elastic.snapshot.layout import Box, TensorSpec
from elastic.snapshot.restore_plan import RestorePlan, plan_restore
from elastic.snapshot.sources import VerifiedSource

WINDOW_BYTES = 16 << 20
"""Most bytes of boxes that are held at a time, and again most bytes of chunks."""

Raw = npt.NDArray[np.uint8]
Wanted = tuple[str, Box]


def cut(spec: TensorSpec, most_bytes: int = WINDOW_BYTES) -> Iterator[Box]:
    """The tensor in boxes of at most ``most_bytes`` whose bytes, put together, are the tensor row-major.

    It is cut along its first dimension into runs of rows; where a single row is larger, along the next. A tensor
    without elements gives none.
    """
    if not spec.nbytes:
        return
    row_bytes, dim = spec.nbytes, -1
    while row_bytes > most_bytes and dim + 1 < len(spec.shape):
        dim += 1
        row_bytes //= spec.shape[dim]
    if dim < 0:
        yield spec.box
        return
    run = max(1, most_bytes // row_bytes)
    for outer in np.ndindex(*spec.shape[:dim]):
        for start in range(0, spec.shape[dim], run):
            rows = min(run, spec.shape[dim] - start)
            yield Box((*outer, start, *(0,) * len(spec.shape[dim + 1 :])), (*(1,) * dim, rows, *spec.shape[dim + 1 :]))


class BoxStream:
    """Reads boxes of one snapshot. Holds one window of boxes, always in the same memory, and one of chunks."""

    def __init__(self, table: ChunkTable, source: VerifiedSource, window_bytes: int = WINDOW_BYTES) -> None:
        self._table, self._source, self._window_bytes = table, source, window_bytes
        self._ids = {spec.name: i for i, spec in enumerate(table.specs)}
        self._order = np.argsort(table.tensor_id, kind="stable")
        self._first = np.searchsorted(table.tensor_id[self._order], np.arange(len(table.specs) + 1))
        self._buffer: Raw = np.empty(0, np.uint8)

    def read(self, wanted: Sequence[Wanted]) -> Iterator[Raw]:
        """The bytes of each box, row-major, in order: uint8 [elements × item size], valid until the next is asked for.

        Names are those of tensors, not aliases. Raises CorruptSnapshot if a chunk has no good copy.
        """
        sizes = [math.prod(box.shape) * self._table.specs[self._ids[name]].itemsize for name, box in wanted]
        places = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
        start = 0
        while start < len(wanted):
            stop, total = start + 1, places[start]
            while stop < len(wanted) and total + places[stop] <= self._window_bytes:
                total += places[stop]
                stop += 1
            yield from self._window(wanted[start:stop], sizes[start:stop], places[start:stop])
            start = stop

    def _window(self, wanted: Sequence[Wanted], sizes: Sequence[int], places: Sequence[int]) -> Iterator[Raw]:
        begin = np.cumsum([0, *places[:-1]])
        ends = begin + sizes
        if len(self._buffer) < ends[-1]:
            self._buffer = np.empty(max(int(ends[-1]), self._window_bytes), np.uint8)
        part = self._part({name for name, _ in wanted})
        plan = plan_restore(part, wanted, self._window_bytes)
        for window, copies in zip(plan.windows, plan.copies):
            chunks = self._source.read(part, plan.rows[window])
            for copy in range(copies.start, copies.stop):
                chunk = np.frombuffer(chunks[int(plan.source[copy]) - window.start], np.uint8)
                target = int(plan.target[copy])
                place = self._buffer[begin[target] : ends[target]]
                _copy(plan, copy, chunk, place, part, wanted[target][1])
        for start, end in zip(begin.tolist(), ends.tolist()):
            yield self._buffer[start:end]

    def _part(self, names: set[str]) -> ChunkTable:
        """The table of some tensors alone, so that planning does not look at all the others each time."""
        ids = sorted(self._ids[name] for name in names)
        rows: Ints = np.concatenate([self._order[self._first[i] : self._first[i + 1]] for i in ids])
        part = self._table.take(rows)
        return replace(
            part,
            specs=tuple(self._table.specs[i] for i in ids),
            tensor_id=np.searchsorted(np.array(ids), part.tensor_id).astype(np.int32),
        )


def _copy(plan: RestorePlan, copy: int, chunk: Raw, place: Raw, table: ChunkTable, box: Box) -> None:
    """One region of a chunk to its place in a box."""
    if plan.flat[copy]:
        source, target, nbytes = int(plan.source_byte[copy]), int(plan.target_byte[copy]), int(plan.nbytes[copy])
        place[target : target + nbytes] = chunk[source : source + nbytes]
        return
    row = int(plan.rows[plan.source[copy]])
    held, dims = table.box(row), len(box.shape)
    itemsize = table.specs[table.tensor_id[row]].itemsize
    extent = plan.extent[copy, :dims].tolist()
    take = tuple(slice(a, a + n) for a, n in zip(plan.source_offset[copy, :dims].tolist(), extent))
    put = tuple(slice(a, a + n) for a, n in zip(plan.target_offset[copy, :dims].tolist(), extent))
    place.reshape(*box.shape, itemsize)[put] = chunk.reshape(*held.shape, itemsize)[take]
