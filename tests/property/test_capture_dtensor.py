"""DTensors are saved by their placements and their own part; what a layout cannot say is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.simulated_ranks import take_snapshot
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.errors import CaptureError
from elastic.mesh import Mesh
from elastic.snapshot.capture import Attached
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.restore import restore

MESH = Mesh((("dp", 2), ("tp", 2)))
WHOLE = torch.arange(7 * 5.0).reshape(7, 5)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NodeTier]:
    tier = NodeTier(tmp_path / "arena")
    yield tier
    tier.close()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of four that never speaks: rank 0 of it is this process."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def mesh_seen_by(rank: int, names: tuple[str, ...] | None = ("dp", "tp")) -> DeviceMesh:
    """The 2 × 2 mesh in an order in which rank 0 of the group has the coordinate of ``rank``."""
    ranks = [0, 1, 2, 3]
    ranks[0], ranks[rank] = ranks[rank], ranks[0]
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(2, 2), mesh_dim_names=names, _init_backend=False)


def part_of(rank: int, whole: torch.Tensor, placements: tuple[object, ...], mesh: Mesh = MESH) -> torch.Tensor:
    local = whole
    for (axis, size), placement in zip(mesh.axes, placements):
        if isinstance(placement, Shard):
            parts = list(torch.chunk(local, size, placement.dim))
            place = mesh.coordinate(rank)[axis]
            local = parts[place] if place < len(parts) else local.narrow(placement.dim, 0, 0)
    return local.clone()


def module_on(rank: int, whole: torch.Tensor, placements: tuple[object, ...]) -> nn.Module:
    local = part_of(rank, whole, placements)
    dtensor = DTensor.from_local(
        local, mesh_seen_by(rank), placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    module = nn.Module()
    module.weight = nn.Parameter(dtensor)
    return module


LAYOUTS = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(-1)),
]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("after", LAYOUTS, ids=str)
@pytest.mark.parametrize("before", LAYOUTS, ids=str)
def test_shards_of_one_placement_come_back_as_those_of_another(
    tier: NodeTier, before: tuple[object, ...], after: tuple[object, ...]
) -> None:
    ranks = [Attached({"model": module_on(r, WHOLE, before)}, MESH, r) for r in range(4)]
    index, source = take_snapshot(tier, ranks)
    assert int(index.table.nbytes.sum()) == WHOLE.nbytes
    for rank in range(4):
        module = module_on(rank, torch.zeros(7, 5), after)
        restore(Attached({"model": module}, MESH, rank), index, source)
        assert torch.equal(module.weight.to_local(), part_of(rank, WHOLE, after))


@pytest.mark.usefixtures("group")
def test_sharded_parameters_come_back_as_plain_ones_with_their_optimizer_state(tier: NodeTier) -> None:
    placements = (Shard(0), Replicate())
    ranks = []
    for rank in range(4):
        module = module_on(rank, WHOLE, placements)
        optimizer = torch.optim.Adam(module.parameters())
        moment = module_on(rank, WHOLE * 2, placements).weight.detach()
        optimizer.state[module.weight] = {"step": torch.tensor(3.0), "exp_avg": moment}
        ranks.append(Attached({"model": module, "optimizer": optimizer}, MESH, rank))
    index, source = take_snapshot(tier, ranks)
    plain = nn.Module()
    plain.weight = nn.Parameter(torch.zeros(7, 5))
    optimizer = torch.optim.Adam(plain.parameters())
    restore(Attached({"model": plain, "optimizer": optimizer}, Mesh((("dp", 1),)), 0), index, source)
    assert torch.equal(plain.weight, WHOLE)
    assert torch.equal(optimizer.state[plain.weight]["exp_avg"], WHOLE * 2)

    module = module_on(2, torch.zeros(7, 5), (Replicate(), Shard(1)))
    optimizer = torch.optim.Adam(module.parameters())
    restore(Attached({"model": module, "optimizer": optimizer}, MESH, 2), index, source)
    moment = optimizer.state[module.weight]["exp_avg"]
    assert moment.placements == module.weight.placements
    assert torch.equal(moment.to_local(), part_of(2, WHOLE * 2, (Replicate(), Shard(1))))


@pytest.mark.usefixtures("group")
def test_six_rows_over_four_ranks_leave_the_last_without_any(tier: NodeTier) -> None:
    whole = torch.arange(6.0)
    placements = (Shard(0), Shard(0))
    ranks = [Attached({"model": module_on(r, whole, placements)}, MESH, r) for r in range(4)]
    index, source = take_snapshot(tier, ranks)
    for rank in range(4):
        module = module_on(rank, torch.zeros(6), placements)
        restore(Attached({"model": module}, MESH, rank), index, source)
        assert torch.equal(module.weight.to_local(), part_of(rank, whole, placements))


@pytest.mark.usefixtures("group")
def test_unreduced_parts_are_refused_by_name() -> None:
    module = nn.Module()
    module.register_buffer("sum", DTensor.from_local(WHOLE, mesh_seen_by(0), (Partial(), Replicate()), run_check=False))
    with pytest.raises(CaptureError, match=r"Partial.*'dp'.*model\.sum.*redistribute"):
        Attached({"model": module}, MESH, 0)


@pytest.mark.usefixtures("group")
def test_a_device_mesh_without_names_or_of_another_size_is_refused_with_the_cure() -> None:
    def attach(device_mesh: DeviceMesh, mesh: Mesh) -> None:
        module = nn.Module()
        module.register_buffer("t", DTensor.from_local(WHOLE, device_mesh, (Replicate(), Replicate()), run_check=False))
        Attached({"model": module}, mesh, 0)

    with pytest.raises(CaptureError, match=r"no axis names.*model\.t.*run\.device_mesh"):
        attach(mesh_seen_by(0, None), MESH)
    with pytest.raises(CaptureError, match=r"'dp' .* has 2 ranks, that of run.mesh \(dp4\) has 4"):
        attach(mesh_seen_by(0), Mesh((("dp", 4),)))


@pytest.mark.usefixtures("group")
def test_a_rank_whose_device_mesh_numbers_the_ranks_otherwise_is_refused() -> None:
    module = module_on(1, WHOLE, (Shard(0), Shard(1)))
    with pytest.raises(CaptureError, match=r"rank 0 is 1 on axis 'tp' .* and 0 on that of run\.mesh"):
        Attached({"model": module}, MESH, 0)
