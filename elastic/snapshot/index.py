"""The index of a snapshot: all that a restore must know before it reads a byte of a tensor. Either tier makes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.errors import CorruptSnapshot
from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime
from elastic.snapshot.chunk_table import ChunkTable, spec_columns
from elastic.snapshot.coverage import not_proven
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
    """Raise CorruptSnapshot unless the chunks of every tensor tile it, and every alias stands for a tensor."""
    names = {spec.name for spec in table.specs} if table.aliases else set[str]()
    if dangling := [alias for alias, name in table.aliases if name not in names]:
        raise CorruptSnapshot(f"alias {dangling[0]!r} stands for a tensor that the snapshot does not hold")
    whole, _ = spec_columns(table)
    doubtful, boxes = not_proven(table.tensor_id, table.offset, table.shape, whole)
    for number, rows in zip(doubtful.tolist(), boxes.of(doubtful)):
        spec = table.specs[number]
        dims = len(spec.shape)
        parts = zip(boxes.offset[rows, :dims].tolist(), boxes.shape[rows, :dims].tolist())
        check_tiling(spec, (Box(tuple(at), tuple(size)) for at, size in parts))
