"""The index of a snapshot of the node tier, from the headers of its shares. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.errors import CommitRefused, CorruptSnapshot
from elastic.mesh import Mesh
from elastic.protocol.commit import check_points
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.held_share import ShareHeader
from elastic.snapshot.index import ObjectTrees, SnapshotIndex
from elastic.snapshot.seal import digest_objects


def index_of_headers(attempt: str, headers: Mapping[int, ShareHeader], snapshot_id: str = "") -> SnapshotIndex:
    """The index of the shares of all ranks. Raises as ``NodeTier.index``."""
    if not headers:
        raise CorruptSnapshot("no share of the attempt is held", f"attempt {attempt}")
    first = next(iter(headers.values()))
    if missing := sorted(set(range(first.world_size)) - set(headers)):
        raise CorruptSnapshot(f"the shares of ranks {missing[:8]} are held nowhere", f"attempt {attempt}")
    ordered = [headers[rank] for rank in range(first.world_size)]
    point = check_points({header.rank: header.point for header in ordered}, f"attempt {attempt}")
    if unlike := [header.rank for header in ordered if header.mesh != first.mesh]:
        raise CommitRefused(f"ranks {unlike[:8]} were on another mesh than rank {first.rank}", f"attempt {attempt}")
    algorithm = first.table.algorithm
    digests = [digest_objects(header.objects, algorithm) for header in ordered]
    trees = dict(zip(digests, (header.objects for header in ordered)))
    return SnapshotIndex(
        point.step,
        attempt,
        snapshot_id,
        Mesh(first.mesh),
        point,
        ChunkTable.concat([header.table for header in ordered]),
        ObjectTrees(tuple(digests), trees),
    )
