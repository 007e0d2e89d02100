"""A durable snapshot of examples/minimal.py, made by its own loop and the real engine, without Ray."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from elastic.data.ledger import LedgerEntry, LedgerRow, encode_row
from elastic.data.loader import ElasticLoader
from elastic.journal import encode, segment_key
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


def commit_minimal(
    directory: Path,
    store: BlobStore,
    steps: int,
    ranks: int = 2,
    damage: bool = False,
    then: int = 0,
    pull: float = 0.0,
) -> SnapshotRef:
    """The snapshot after ``steps`` steps on ``ranks`` data-parallel ranks. ``damage``: of a state that no run had.

    The run takes ``then`` more steps, which only its journal tells of. ``pull`` is the weight, in its loss, of an
    average of past models that is no part of the snapshot.
    """
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    seed_everything(0, -1, {})
    model = torch.nn.Linear(16, 1)
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ElasticLoader(dataset, global_batch_size=64, seed=17)

    def take(count: int) -> Iterator[tuple[float, LedgerEntry]]:
        """The loss of rank 0, and what all ranks consumed, of each of the next steps."""
        for _ in range(count):
            batch = loader.fetch()
            assert batch is not None
            inputs, targets = batch
            outputs = model(inputs)
            each = (outputs - targets) ** 2 + pull * (outputs - teacher(inputs)) ** 2
            each.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            teacher.weight.lerp_(model.weight.detach(), 0.1)
            teacher.bias.lerp_(model.bias.detach(), 0.1)
            yield float(each[: 64 // ranks].detach().mean()), loader.advance()

    list(take(steps))
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
    told = list(enumerate(take(then), steps))
    metrics = [(step + 1, 0.1, {"loss": loss}) for step, (loss, _) in told]
    rows = [encode_row(LedgerRow(1, step, 0, 1, e.start, e.stop, e.digest, e.tokens)) for step, (_, e) in told]
    store.put(
        segment_key(RUN, "c1", 0),
        encode(
            [
                {"kind": "metrics", "t": 1.0, "generation": 1, "rows": metrics},
                {"kind": "committed", "t": 2.0, "attempt": "g1-later", "step": steps + then, "ledger": rows},
            ]
        ),
    )
    return ref
