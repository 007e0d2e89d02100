"""Small snapshots made by the real engine: tensors cut over a mesh, staged, sealed, and committed durably.

maker = SnapshotMaker(tmp_path / "arena", mesh={"dp": 3})
ref = maker.commit(store, step=10)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime, ShareReport, StagedShare
from elastic.snapshot.committer import commit_remote
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.layout import Layout, TensorSpec
from elastic.snapshot.manifest import FileRecord, SnapshotRef
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.object_names import attempt_name, attempt_prefix, new_snapshot_id
from elastic.snapshot.save_plan import SaveShare, plan_share
from elastic.storage.blob_store import BlobStore

RUN = "a-run"
LAYOUTS = (
    Layout(TensorSpec("embedding.weight", "float32", (50, 16), 4)),
    Layout(TensorSpec("linear.weight", "float32", (12, 10), 4), (("tp", 1),)),
    Layout(TensorSpec("linear.bias", "float64", (7,), 8)),
    Layout(TensorSpec("step", "int64", (), 8)),
    Layout(TensorSpec("mask", "bool", (3, 1, 5), 1)),
)
ALIASES = (("head.weight", "embedding.weight"),)


class SnapshotMaker:
    """One node that holds all ranks of a mesh."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        mesh: Mapping[str, int] | None = None,
        layouts: tuple[Layout, ...] = LAYOUTS,
        **tier: Any,
    ) -> None:
        self.mesh = Mesh(tuple((mesh or {"dp": 2, "tp": 2}).items()))
        self.layouts = layouts
        self.shares = [plan_share(layouts, self.mesh, rank, ALIASES) for rank in range(self.mesh.world_size)]
        self.tier = NodeTier(directory, **tier)
        self.tier.reserve(max(1, *(share.nbytes for share in self.shares)), len(self.shares))
        self.number = 0

    def values(self, seed: int) -> dict[str, npt.NDArray[np.uint8]]:
        """The bytes of every tensor, [*shape, itemsize]."""
        random = np.random.default_rng(seed)
        return {
            layout.spec.name: random.integers(0, 2, (*layout.spec.shape, layout.spec.itemsize), dtype=np.uint8)
            for layout in self.layouts
        }

    def stage(
        self,
        step: int,
        values: Mapping[str, npt.NDArray[np.uint8]],
        rank: int,
        slot: Any,
        attempt: str,
        generation: int,
    ) -> StagedShare:
        """Copy one rank's share into its slot, as a rank would."""
        share = self.shares[rank]
        view = self.tier.arena.view(slot)
        for piece in share.pieces:
            part = values[piece.tensor.name][piece.box.within(piece.tensor.box)]
            view[piece.offset : piece.offset + piece.nbytes] = np.ascontiguousarray(part).reshape(-1)
        return StagedShare(
            attempt,
            rank,
            self.mesh.world_size,
            self.mesh.axes,
            PointInTime(generation, step, data_cursor=step * 8),
            slot,
            share.nbytes,
            share.key,
            share.to_bytes(),
            b'{"optimizer":{"lr":0.1}}',
        )

    def take(
        self, step: int, values: Mapping[str, npt.NDArray[np.uint8]] | None = None, generation: int = 1
    ) -> tuple[str, list[ShareReport]]:
        """Take and commit a node snapshot: the attempt and what was reported."""
        self.number += 1
        attempt = attempt_name(generation, self.number)
        slots = self.tier.open_attempt(attempt, {share.rank: share.nbytes for share in self.shares})
        assert slots is not None
        held = self.values(step) if values is None else values
        reports = [
            self.tier.seal(self.stage(step, held, rank, slot, attempt, generation)) for rank, slot in slots.items()
        ]
        self.tier.commit(attempt)
        return attempt, reports

    def upload(
        self, store: BlobStore, step: int, attempt: str, now_s: float, previous: SnapshotRef | None = None, **more: Any
    ) -> tuple[SnapshotIndex, list[FileRecord]]:
        snapshot_id = new_snapshot_id(now_s, f"{self.number:04x}")
        prefix = attempt_prefix(RUN, step, snapshot_id, attempt)
        files = self.tier.upload(attempt, store, prefix, node=0, previous=previous, **more)
        return self.tier.index(attempt, snapshot_id=snapshot_id), files

    def commit(
        self,
        store: BlobStore,
        step: int,
        values: Mapping[str, npt.NDArray[np.uint8]] | None = None,
        *,
        previous: SnapshotRef | None = None,
        now_s: float = 1_000_000.0,
        generation: int = 1,
        metrics: Mapping[str, float] | None = None,
    ) -> SnapshotRef:
        """A durable snapshot of ``values`` (default: made from ``step``)."""
        attempt, reports = self.take(step, values, generation)
        index, files = self.upload(store, step, attempt, now_s, previous)
        return commit_remote(
            store,
            RUN,
            index,
            reports,
            files,
            versions={"torch": "2"},
            has={"optimizer": True},
            write_id=f"write-{step}-{self.number}",
            committed_at_s=now_s,
            previous=previous,
            metrics=metrics,
        )

    def share_of(self, rank: int) -> SaveShare:
        return self.shares[rank]

    def close(self) -> None:
        self.tier.close()


def assert_holds(loaded: Mapping[str, npt.NDArray[Any]], values: Mapping[str, npt.NDArray[np.uint8]]) -> None:
    """Every tensor of ``values`` was loaded bit for bit, and the alias with it."""
    for name, expected in values.items():
        raw = np.ascontiguousarray(loaded[name]).reshape(-1).view(np.uint8)
        assert raw.tobytes() == expected.tobytes(), name
    for alias, name in ALIASES:
        if name in values:
            assert loaded[alias] is loaded[name]
