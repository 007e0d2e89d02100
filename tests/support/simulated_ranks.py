"""Ranks without Ray: each an ``Attached`` on a mesh, all of them on one node tier in this process."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime
from elastic.snapshot.capture import Attached
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.sources import VerifiedSource
from elastic.snapshot.staging import Stager, capture_and_stage


def mesh_of(ranks: int) -> Mesh:
    return Mesh((("dp", ranks),))


def take_snapshot(
    tier: NodeTier, ranks: Sequence[Attached], attempt: str = "g1-a1", step: int = 0, stagers: Sequence[Stager] = ()
) -> tuple[SnapshotIndex, VerifiedSource]:
    """Capture, stage, seal and commit the state of all ranks; the index of the snapshot and where to read it."""
    stagers = stagers or [Stager() for _ in ranks]
    sizes = {rank.rank: rank.share_bytes() for rank in ranks}
    tier.reserve(max(sizes.values()), len(ranks))
    slots = tier.open_attempt(attempt, sizes)
    assert slots is not None
    for rank, stager in zip(ranks, stagers):
        share = capture_and_stage(rank, stager, slots[rank.rank], attempt=attempt, point=PointInTime(1, step))
        tier.seal(share)
    tier.commit(attempt)
    index = tier.index(attempt)
    index.check_coverage()
    return index, tier.source(attempt)
