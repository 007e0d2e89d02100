"""What to read for the boxes that a rank wants, and where each part of it goes. Pure.

Saved chunks meet wanted boxes by intersection, in columns over all chunks at once, so it does not matter how many
ranks wrote them or on which mesh: a box is a box. Only chunks that hold something wanted are read, in the order in
which they lie in their files, in windows of bounded size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from elastic.errors import CorruptSnapshot
from elastic.snapshot.chunk_table import ChunkTable, spec_columns
from elastic.snapshot.coverage import not_proven
from elastic.snapshot.layout import Box, TensorSpec, check_tiling

WINDOW_BYTES = 64 << 20
"""Most bytes of chunks that are held at a time, unless one chunk is larger."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RestorePlan:
    """Chunks to read and the copies out of them.

    ``rows`` [n] are rows of the chunk table in reading order; ``windows`` are runs of them. The columns of the copies
    [c] are sorted by ``source``, the position in ``rows``: ``target`` is the position among the wanted boxes; the
    region has ``extent`` [c, d] and begins at ``source_offset`` in its chunk and at ``target_offset`` in the wanted
    box. Where ``flat`` the region is contiguous in both: ``nbytes`` from ``source_byte`` to ``target_byte``.
    """

    rows: Ints
    windows: tuple[slice, ...]
    copies: tuple[slice, ...]
    """The copies out of each window."""
    source: Ints
    target: Ints
    source_offset: Ints
    target_offset: Ints
    extent: Ints
    flat: npt.NDArray[np.bool_]
    source_byte: Ints
    target_byte: Ints
    nbytes: Ints
    read_bytes: int

    @property
    def copied_bytes(self) -> int:
        return int(self.nbytes.sum())


Wanted = tuple[str, "Box | None"]
"""The name of a saved tensor (not an alias) and a box of it; None is all of it."""


def plan_restore(table: ChunkTable, wanted: Sequence[Wanted], window_bytes: int = WINDOW_BYTES) -> RestorePlan:
    """The plan for the boxes that are ``wanted``.

    Raises CorruptSnapshot naming the tensor if the chunks do not tile a wanted box: no gap, no overlap.
    """
    tensor = _tensors(table, wanted)
    low, size = _columns(table, wanted, tensor)
    row, target = _pairs(table, tensor)
    chunk_low, chunk_size = table.offset[row], table.shape[row]
    start = np.maximum(chunk_low, low[target])
    extent = np.minimum(chunk_low + chunk_size, low[target] + size[target]) - start
    meets = np.flatnonzero((extent > 0).all(axis=1))
    meets = meets[np.lexsort((table.byte_start[row[meets]], table.pack_id[row[meets]]))]
    row, target, start, extent = row[meets], target[meets], start[meets], extent[meets]
    chunk_low, chunk_size = chunk_low[meets], chunk_size[meets]

    new_row = np.flatnonzero(np.diff(row, prepend=-1))
    rows = row[new_row]
    source = np.cumsum(np.diff(row, prepend=-1) != 0) - 1
    source_offset, target_offset = start - chunk_low, start - low[target]
    itemsize = np.array([spec.itemsize for spec in table.specs] or [1], np.int64)[table.tensor_id[row]]
    nbytes = extent.prod(axis=1) * itemsize
    _check_filled(table, tensor, low, size, target, target_offset, extent)
    windows = windows_of(table.nbytes[rows], window_bytes)
    edges = np.searchsorted(source, [window.start for window in windows] + [len(rows)])
    return RestorePlan(
        rows,
        windows,
        tuple(slice(a, b) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist())),
        source,
        target,
        source_offset,
        target_offset,
        extent,
        _is_run(extent, chunk_size) & _is_run(extent, size[target]),
        _flat_index(source_offset, chunk_size) * itemsize,
        _flat_index(target_offset, size[target]) * itemsize,
        nbytes,
        int(table.nbytes[rows].sum()),
    )


def _tensors(table: ChunkTable, wanted: Sequence[Wanted]) -> Ints:
    """The tensor of each wanted box, by its place in ``table.specs``."""
    ids = {spec.name: number for number, spec in enumerate(table.specs)}
    tensor = np.fromiter(map(ids.get, (name for name, _ in wanted), repeat(-1)), np.int64, len(wanted))
    if len(wanted) and tensor.min() < 0:
        name = wanted[int(np.argmin(tensor))][0]
        raise CorruptSnapshot(f"tensor {name!r} is not in the snapshot's chunk table")
    return tensor


def _pairs(table: ChunkTable, tensor: Ints) -> tuple[Ints, Ints]:
    """Every (row, wanted box) of the same tensor. Rows of tensors that nobody wants are dropped at once."""
    order = np.argsort(tensor, kind="stable")
    count = np.bincount(tensor, minlength=len(table.specs)) if len(tensor) else np.zeros(len(table.specs), np.int64)
    first = np.cumsum(count) - count
    rows = np.flatnonzero(count[table.tensor_id] > 0) if len(table) else np.zeros(0, np.int64)
    held = table.tensor_id[rows]
    repeats = count[held]
    if len(rows) and repeats.max() > 1:
        rows = np.repeat(rows, repeats)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        return rows, order[first[table.tensor_id[rows]] + within]
    return rows, order[first[held]] if len(rows) else np.zeros(0, np.int64)


def _columns(table: ChunkTable, wanted: Sequence[Wanted], tensor: Ints) -> tuple[Ints, Ints]:
    """Offsets and shapes of the wanted boxes, [n, dims] each, unused dimensions as in a chunk table."""
    size = spec_columns(table)[0][tensor]
    low = np.zeros_like(size)
    parts: dict[int, list[tuple[int, Box]]] = {}
    for number, (_, box) in enumerate(wanted):
        if box is not None and box.shape:
            parts.setdefault(len(box.shape), []).append((number, box))
    for rank, found in parts.items():
        at = [number for number, _ in found]
        low[at, :rank] = [box.offset for _, box in found]
        size[at, :rank] = [box.shape for _, box in found]
    return low, size


def _check_filled(
    table: ChunkTable, tensor: Ints, low: Ints, size: Ints, target: Ints, offset: Ints, extent: Ints
) -> None:
    """Raise CorruptSnapshot unless the regions that arrive in each wanted box tile it: no gap, no overlap."""

    def wanted(number: int) -> tuple[str, Box]:
        spec = table.specs[tensor[number]]
        dims = len(spec.shape)
        return spec.name, Box(tuple(low[number, :dims].tolist()), tuple(size[number, :dims].tolist()))

    arriving = np.bincount(target, extent.prod(axis=1), len(size)).astype(np.int64)
    if len(short := np.flatnonzero(arriving != size.prod(axis=1))):
        name, box = wanted(int(short[0]))
        raise CorruptSnapshot(
            f"tensor {name!r}: {int(arriving[short[0]])} elements of the snapshot lie in {box}, which has {box.volume}"
        )
    doubtful, parts = not_proven(target, offset, extent, size)
    for number, rows in zip(doubtful.tolist(), parts.of(doubtful)):
        name, box = wanted(number)
        dims = len(box.shape)
        boxes = zip(parts.offset[rows, :dims].tolist(), parts.shape[rows, :dims].tolist())
        check_tiling(TensorSpec(name, "", box.shape, 1), (Box(tuple(at), tuple(shape)) for at, shape in boxes))


def _is_run(extent: Ints, whole: Ints) -> npt.NDArray[np.bool_]:
    """Whether a region of ``extent`` is one contiguous run of a row-major box of shape ``whole``.

    It is if some dimension has single rows before it and whole dimensions after it.
    """
    single = np.cumprod(np.pad(extent[:, :-1] == 1, ((0, 0), (1, 0)), constant_values=True), axis=1).astype(bool)
    filled = np.pad(extent[:, 1:] == whole[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    filled = np.cumprod(filled[:, ::-1], axis=1)[:, ::-1].astype(bool)
    return np.asarray((single & filled).any(axis=1))


def _flat_index(offset: Ints, shape: Ints) -> Ints:
    """Row-major index of ``offset`` in boxes of ``shape``, row by row."""
    index = np.zeros(len(offset), np.int64)
    for dim in range(offset.shape[1]):
        index = index * shape[:, dim] + offset[:, dim]
    return index


def windows_of(nbytes: Ints, window_bytes: int) -> tuple[slice, ...]:
    """Runs of rows of at most ``window_bytes``, or of one row that is larger."""
    ends = np.cumsum(nbytes)
    windows: list[slice] = []
    start = 0
    while start < len(nbytes):
        limit = (int(ends[start - 1]) if start else 0) + window_bytes
        stop = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
        windows.append(slice(start, stop))
        start = stop
    return tuple(windows)
