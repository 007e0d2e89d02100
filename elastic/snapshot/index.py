"""The index of a snapshot: all that a restore must know before it reads a byte of a tensor. Either tier makes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastic.errors import CorruptSnapshot
from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime
from elastic.snapshot.chunk_file import spec_columns
from elastic.snapshot.chunk_table import ChunkTable, Ids, Ints
from elastic.snapshot.layout import Box, check_tiling


@dataclass(frozen=True, slots=True)
class ObjectTrees:
    """Everything that is not a tensor, per rank, each distinct tree once.

    ``ranks[r]`` is the digest of rank r's tree, ``trees`` maps a digest to canonical JSON bytes (see tree).
    """

    ranks: tuple[str, ...]
    trees: Mapping[str, bytes]

    def of(self, rank: int) -> bytes:
        """The tree of ``rank`` of the world that wrote the snapshot."""
        return self.trees[self.ranks[rank]]


@dataclass(frozen=True, slots=True)
class SnapshotIndex:
    """What one snapshot holds and where. ``manifest`` is empty for a snapshot of the node tier."""

    step: int
    attempt: str
    snapshot_id: str
    mesh: Mesh
    point: PointInTime
    table: ChunkTable
    objects: ObjectTrees
    versions: Mapping[str, str] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks that wrote the snapshot."""
        return len(self.objects.ranks)

    def check_coverage(self) -> None:
        """Raise CorruptSnapshot unless the chunks of every tensor tile it: no gap, no overlap."""
        check_coverage(self.table)


def check_coverage(table: ChunkTable) -> None:
    """Raise CorruptSnapshot unless the chunks of every tensor tile it, and every alias stands for a tensor.

    Chunks that continue one another along dimension 0 are joined first, in columns; what is left, one box for most
    tensors and a few for one that is cut on several dimensions, is checked box by box.
    """
    names = {spec.name for spec in table.specs}
    if dangling := [alias for alias, name in table.aliases if name not in names]:
        raise CorruptSnapshot(f"alias {dangling[0]!r} stands for a tensor that the snapshot does not hold")
    tensor, offset, shape = _join_rows(table)
    whole, _ = spec_columns(table)
    single = np.bincount(tensor, minlength=len(table.specs)) == 1
    fits = ((offset == 0) & (shape == whole[tensor])).all(axis=1) if len(tensor) else np.zeros(0, bool)
    done = np.zeros(len(table.specs), bool)
    done[tensor[fits]] = True
    left = np.flatnonzero(~(done & single))
    if not len(left):
        return
    order = np.argsort(tensor, kind="stable")
    first = np.searchsorted(tensor[order], left, side="left")
    last = np.searchsorted(tensor[order], left, side="right")
    for i, start, stop in zip(left.tolist(), first.tolist(), last.tolist()):
        spec = table.specs[i]
        dims = len(spec.shape)
        rows = order[start:stop]
        boxes = zip(offset[rows, :dims].tolist(), shape[rows, :dims].tolist())
        check_tiling(spec, (Box(tuple(at), tuple(size)) for at, size in boxes))


def _join_rows(table: ChunkTable) -> tuple[Ids, Ints, Ints]:
    """Boxes (tensor [m], offset [m, d], shape [m, d]) after joining chunks that continue each other on dimension 0."""
    tensor, offset, shape = table.tensor_id, table.offset, table.shape
    if not len(tensor):
        return tensor, offset, shape
    across = [column[:, d] for d in range(1, offset.shape[1]) for column in (offset, shape)]
    order = np.lexsort(np.stack([offset[:, 0], *across, tensor.astype(np.int64)]))
    tensor, offset, shape = tensor[order], offset[order], shape[order]
    same = (tensor[1:] == tensor[:-1]) & (offset[1:, 0] == offset[:-1, 0] + shape[:-1, 0])
    same &= ((offset[1:, 1:] == offset[:-1, 1:]) & (shape[1:, 1:] == shape[:-1, 1:])).all(axis=1)
    heads = np.flatnonzero(np.concatenate(([True], ~same)))
    joined = shape[heads].copy()
    joined[:, 0] = np.add.reduceat(shape[:, 0], heads)
    return tensor[heads], offset[heads], joined
