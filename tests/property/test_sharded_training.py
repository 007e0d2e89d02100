"""Real FSDP2, tensor parallel and HSDP on gloo: trained, saved, and restored as another of them, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.gloo_ranks import run_ranks, take_snapshot_together
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic.mesh import Mesh
from elastic.snapshot.capture import Attached
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.restore import restore

WAYS = {
    "replicated": (("dp", 4),),
    "fsdp": (("dp", 4),),
    "fsdp x tp": (("dp", 2), ("tp", 2)),
    "hsdp": (("dp_replicate", 2), ("dp_shard", 2)),
    "fsdp over dp and cp": (("dp", 2), ("cp", 2)),
    "tp": (("tp", 4),),
}
WIDTH, HIDDEN = 6, (12, 14)


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Tiny(nn.Module):
    """Dimensions that the axes do not divide: 6 wide, 14 hidden (over two and two), 7 rows embedded, a head of one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for hidden in HIDDEN)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def build(way: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tiny()
    axes = dict(WAYS[way])
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if "tp" in axes:
        for block in [block for block in model.blocks if block.up.out_features % axes["tp"] == 0]:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data: DeviceMesh | None = None
    if way in ("fsdp", "fsdp x tp"):
        data = mesh["dp"]
    elif way == "hsdp":
        data = mesh
    elif way == "fsdp over dp and cp":
        data = mesh._flatten("dp_cp")
    if data is not None:
        for block in model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    tokens = torch.randint(0, 7, (8, 5), generator=torch.Generator().manual_seed(number))
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, torch.Tensor]:
    """Every parameter and moment, gathered by torch."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter).detach().clone()
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = whole(value).clone()
    return found


def train_save_and_restore(rank: int, directory: Path) -> None:
    plain = build("replicated", 1)
    expected = [step(*plain, number) for number in range(4)]
    ways = list(WAYS)
    for place, (way, axes) in enumerate(WAYS.items()):
        model, optimizer = build(way, 1)
        losses = [step(model, optimizer, number) for number in range(3)]
        assert losses == pytest.approx(expected[:3], rel=1e-4), way
        before = values(model, optimizer)
        tier = NodeTier(directory / f"arena-{rank}-{way.replace(' ', '-')}")
        attached = Attached({"model": model, "optimizer": optimizer}, Mesh(axes), rank)
        saved = take_snapshot_together(tier, attached, "g1-a1")
        assert saved[0].table.total_bytes == sum(value.nbytes for value in before.values()), "each element once"
        for other in (way, ways[place - 1]):
            model, optimizer = build(other, 2)
            restore(Attached({"model": model, "optimizer": optimizer}, Mesh(WAYS[other]), rank), *saved)
            after = values(model, optimizer)
            assert after.keys() == before.keys()
            assert all(torch.equal(after[name], before[name]) for name in before), f"{way} → {other}"
            assert step(model, optimizer, 3) == pytest.approx(expected[3], rel=1e-4), f"{way} → {other}"
        tier.close()


def test_what_one_way_to_shard_saved_comes_back_in_another(tmp_path: Path) -> None:
    run_ranks(4, train_save_and_restore, tmp_path)
