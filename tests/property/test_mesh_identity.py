"""A process that goes through several process groups: its DTensors lie on the mesh of the group of the day."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.mesh_identity import set_mesh_generation


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    set_mesh_generation(0)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_parameters_and_their_state_lie_on_the_mesh_of_their_own_generation() -> None:
    for generation, (rank, size) in enumerate(((1, 2), (0, 1), (0, 2), (0, 2)), 1):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        set_mesh_generation(generation)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))["dp"]
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.device_mesh is mesh
            assert parameter.grad.device_mesh is mesh
            assert optimizer.state[parameter]["exp_avg"].device_mesh is mesh
            assert parameter.device_mesh.get_coordinate() == (rank,)
        dist.destroy_process_group()
