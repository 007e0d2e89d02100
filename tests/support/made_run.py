"""A durable snapshot of examples/minimal.py, made by its own loop and the real engine, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from elastic.data.loader import ElasticLoader
from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime
from elastic.snapshot.capture import Attached
from elastic.snapshot.committer import commit_remote
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.object_names import attempt_prefix, new_snapshot_id
from elastic.snapshot.rng import seed_everything
from elastic.snapshot.staging import Stager, capture_and_stage
from elastic.storage.blob_store import BlobStore

RUN = "minimal"


class Counters:
    """What a run attaches of itself."""

    def __init__(self, step: int) -> None:
        self.state = {"step": step, "seed": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def commit_minimal(directory: Path, store: BlobStore, steps: int, ranks: int = 2, damage: bool = False) -> SnapshotRef:
    """The snapshot after ``steps`` steps on ``ranks`` data-parallel ranks. ``damage``: of a state that no run had."""
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    seed_everything(0, -1, {})
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ElasticLoader(dataset, global_batch_size=64, seed=17)
    for _ in range(steps):
        batch = loader.fetch()
        assert batch is not None
        inputs, targets = batch
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        loader.advance()
    mesh, attempt = Mesh((("dp", ranks),)), "g1-made"
    named = {"model": model, "optimizer": optimizer, "loader": loader, "run": Counters(steps)}
    attached = [Attached(named, mesh, rank) for rank in range(ranks)]
    tier = NodeTier(directory)
    sizes = {one.rank: one.share_bytes() for one in attached}
    tier.reserve(max(sizes.values()), ranks)
    slots = tier.open_attempt(attempt, sizes)
    assert slots is not None
    cursor = loader.cursor + (64 if damage else 0)
    point = PointInTime(1, steps, cursor, loader.samples_seen, 0, attached[0].optimizer_steps(), ())
    reports = [
        tier.seal(capture_and_stage(one, Stager(), slots[one.rank], attempt=attempt, point=point)) for one in attached
    ]
    tier.commit(attempt)
    snapshot_id = new_snapshot_id(1_000_000.0, "made")
    files = tier.upload(attempt, store, attempt_prefix(RUN, steps, snapshot_id, attempt), node=0)
    index = tier.index(attempt, snapshot_id=snapshot_id)
    ref = commit_remote(
        store, RUN, index, reports, files, versions={}, has={"optimizer": True}, write_id="w", committed_at_s=1.0
    )
    tier.close()
    return ref
