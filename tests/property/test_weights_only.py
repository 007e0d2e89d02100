"""Weights alone: every tensor of a module, tied ones too, bit for bit, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from elastic.errors import SnapshotError
from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime
from elastic.snapshot.capture import Attached
from elastic.snapshot.committer import commit_remote
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.object_names import attempt_prefix
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.staging import Stager, capture_and_stage
from elastic.snapshot.weights_only import weights_index, weights_run
from elastic.storage.local_blobs import LocalBlobs

RUN = "run"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(300, 40)
        self.norm = nn.BatchNorm1d(40)
        self.second = nn.Linear(300, 40, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)) + self.second(x)


class World:
    """Ranks on one node, and a directory."""

    def __init__(self, place: Path, ranks: int, **named: object) -> None:
        self.mesh = Mesh((("dp", ranks),))
        self.ranks = [Attached(named, self.mesh, rank) for rank in range(ranks)]
        self.tier, self.store, self.number = NodeTier(place / "arena"), LocalBlobs(place / "store"), 0

    def commit(self, previous: SnapshotRef | None = None) -> tuple[SnapshotRef, int]:
        """Commit the weights alone; bytes that were written for it."""
        self.number += 1
        attempt, snapshot_id = f"g000001-{self.number:06d}", f"00000000{self.number:02x}-t"
        sizes = {rank: attached.share_bytes() for rank, attached in enumerate(self.ranks)}
        self.tier.reserve(max(sizes.values()), len(sizes))
        slots = self.tier.open_attempt(attempt, sizes)
        assert slots is not None
        reports = []
        for rank, attached in enumerate(self.ranks):
            stager = Stager()
            point = PointInTime(1, self.number)
            reports.append(
                self.tier.seal(capture_and_stage(attached, stager, slots[rank], attempt=attempt, point=point))
            )
            stager.close()
        self.tier.commit(attempt)
        prefix = attempt_prefix(weights_run(RUN), self.number, snapshot_id, attempt)
        files = self.tier.upload(attempt, self.store, prefix, node=0, previous=previous, weights_only=True)
        ref = commit_remote(
            self.store,
            weights_run(RUN),
            weights_index(self.tier.index(attempt, snapshot_id=snapshot_id)),
            reports,
            files,
            versions={},
            has={},
            write_id=snapshot_id,
            committed_at_s=0.0,
            previous=previous,
        )
        return ref, sum(record.nbytes for record in files if record.kind == "pack")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("model_first", [True, False])
def test_the_weights_are_all_there_and_nothing_else_is(tmp_path: Path, ranks: int, model_first: bool) -> None:
    torch.manual_seed(ranks)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 300)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    named = {"optimizer": optimizer, "scheduler": scheduler}
    named = {"model": model, **named} if model_first else {**named, "model": model}
    world = World(tmp_path, ranks, **named)
    try:
        ref, written = world.commit()
        catalog = SnapshotCatalog(world.store, weights_run(RUN))
        found = catalog.load(ref)
        state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        assert set(found) == set(state)
        for name, tensor in state.items():
            assert found[name].tobytes() == tensor.numpy().tobytes()
        index = catalog.open(ref)
        assert b"optimizer" not in b"".join(index.objects.trees.values())
        assert written < 2 * sum(parameter.nbytes for parameter in model.parameters())
        assert SnapshotCatalog(world.store, RUN).list() == [], "no run that resumes would find it"

        with torch.no_grad():
            model.norm.weight.add_(1)
        again, changed = world.commit(ref)
        assert changed < written / 10
        assert (catalog.load(again)["model.norm.weight"] == model.norm.weight.detach().numpy()).all()
    finally:
        world.tier.close()


def test_without_a_module_there_are_no_weights(tmp_path: Path) -> None:
    world = World(tmp_path, 1, optimizer=torch.optim.SGD([nn.Parameter(torch.ones(3))], 0.1))
    try:
        with pytest.raises(SnapshotError, match=r"no module is attached.*leave weights_every out"):
            world.commit()
    finally:
        world.tier.close()
