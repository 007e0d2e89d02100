"""The index of a snapshot of the node tier, from the headers of its shares. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from elastic.errors import CommitRefused, CorruptSnapshot
from elastic.mesh import Mesh
from elastic.protocol.commit import check_agreements, check_points
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
    check_agreements({header.rank: header.agreements for header in ordered}, f"attempt {attempt}")
    algorithm = first.table.algorithm
    digests = [digest_objects(header.objects, algorithm) for header in ordered]
    trees = dict(zip(digests, (header.objects for header in ordered)))
    _check_alike(digests, trees, f"attempt {attempt}")
    return SnapshotIndex(
        point.step,
        attempt,
        snapshot_id,
        Mesh(first.mesh),
        point,
        ChunkTable.concat([header.table for header in ordered]),
        ObjectTrees(tuple(digests), trees),
    )


def _check_alike(ranks: Sequence[str], trees: Mapping[str, bytes], where: str) -> None:
    """Raise CommitRefused if a tensor that counts as replicated is not alike on all ranks: each wrote a part of it."""
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    for digest, tree in trees.items() if len(trees) > 1 else ():
        if b'"samples":' not in tree:
            continue
        rank = ranks.index(digest)
        for component, samples in json.loads(tree).get("samples", {}).items():
            for name, sample in samples.items():
                first, expected = seen.setdefault((component, name), (rank, sample))
                if sample != expected:
                    raise CommitRefused(
                        f"{name} of {component!r} differs between ranks {first} and {rank}, and would be saved as one",
                        where,
                        f"make it equal on all ranks, or attach it as {component}=elastic.per_rank({component})",
                    )
