"""Every mesh to every mesh: what one wrote comes back bit for bit on the other, and training goes on as it would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.sharded_world import VOCABULARY, World, first_weights
from support.simulated_ranks import take_snapshot
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.mesh import Mesh
from elastic.snapshot.capture import Attached
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.restore import restore
from elastic.snapshot.sources import VerifiedSource

MESHES = [
    (("dp", 8),),
    (("dp", 4),),
    (("dp", 3),),
    (("dp", 2), ("tp", 2)),
    (("tp", 4),),
    (("pp", 2), ("dp", 2)),
    (("pp", 4),),
    (("dp", 2), ("ep", 2)),
    (("ep", 4),),
    (("dp", 2), ("cp", 2)),
    (("dp_replicate", 2), ("dp_shard", 2)),
    (("pp", 2), ("ep", 2), ("tp", 2)),
]
TOKENS = torch.randint(0, VOCABULARY, (4, 6, 4), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group that never speaks, for DTensors."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of four steps without any sharding, and all tensors after them."""
    world = World(Mesh((("dp", 1),)), first_weights())
    return [world.step(tokens) for tokens in TOKENS], world.gathered()


def attach(world: World) -> list[Attached]:
    pairs = enumerate(zip(world.stages, world.optimizers))
    return [Attached({"model": m, "optimizer": o}, world.mesh, rank) for rank, (m, o) in pairs]


def written(mesh: Mesh, directory: Path) -> tuple[NodeTier, SnapshotIndex, VerifiedSource, dict[str, torch.Tensor]]:
    """Three steps on ``mesh``, and a snapshot of all its ranks."""
    world = World(mesh, first_weights())
    for tokens in TOKENS[:3]:
        world.step(tokens)
    whole = world.gathered()
    world.check_parts(whole)
    tier = NodeTier(directory)
    index, source = take_snapshot(tier, attach(world))
    assert index.table.total_bytes == sum(tensor.nbytes for tensor in whole.values()), "each element once"
    return tier, index, source, whole


@pytest.mark.parametrize("before", MESHES, ids=lambda axes: str(Mesh(axes)))
def test_what_a_mesh_wrote_comes_back_on_every_other(
    before: tuple[tuple[str, int], ...], tmp_path: Path, reference: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    losses, expected = reference
    tier, index, source, whole = written(Mesh(before), tmp_path / "arena")
    other_weights = {name: torch.full_like(tensor, 0.5) for name, tensor in first_weights().items()}
    for axes in MESHES:
        world = World(Mesh(axes), other_weights)
        for attached in attach(world):
            restore(attached, index, source)
        world.check_parts(whole)
        assert world.step(TOKENS[3]) == pytest.approx(losses[3], rel=1e-5), axes
        after = world.gathered()
        assert after.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.allclose(after[name], tensor, rtol=1e-3, atol=1e-5), f"{name} on {world.mesh}"
    tier.close()
