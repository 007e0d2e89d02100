"""A small transformer-like model on every kind of mesh, all ranks in one process, one after the other.

Tensor parallelism in plain tensors (Megatron-style), pipeline stages with local numbers, experts held by some ranks, an
embedding that the first and the last stage share, hybrid sharding in DTensors. What ranks would send is read from the
other ranks' modules, so that autograd carries it back; gradients of one box are then added up over its holders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import elastic
from elastic.mesh import DATA_AXES, Mesh

VOCABULARY, WIDTH, HIDDEN, LAYERS, EXPERTS = 12, 6, 8, 4, 4


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(hidden, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, hidden))
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("used", torch.zeros(()))
        elastic.declare(self, cuts={"up": {"tp": 0}, "down": {"tp": 1}})


class Layer(nn.Module):
    def __init__(self, hidden: int, experts: range, ep: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(hidden, WIDTH))
        self.out = nn.Parameter(torch.empty(WIDTH, hidden))
        self.bias = nn.Parameter(torch.empty(WIDTH))
        self.router = nn.Parameter(torch.empty(EXPERTS, WIDTH))
        self.experts = nn.ModuleList(Expert(hidden) for _ in experts)
        elastic.declare(self, cuts={"query": {"tp": 0}, "out": {"tp": 1}})
        numbers = {str(local): str(number) for local, number in enumerate(experts)}
        elastic.declare(self.experts, held_at={"ep": ep}, names=numbers)


class Stage(nn.Module):
    """What one rank of ``mesh`` holds."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        super().__init__()
        at = mesh.coordinate(rank)
        self.at = {axis: at.get(axis, 0) for axis in ("pp", "tp", "ep")}
        stages, tp, ep = mesh.size("pp"), mesh.size("tp"), mesh.size("ep")
        self.first_layer = self.at["pp"] * LAYERS // stages
        self.first_expert = self.at["ep"] * EXPERTS // ep
        experts = range(self.first_expert, self.first_expert + EXPERTS // ep)
        self.layers = nn.ModuleList(Layer(HIDDEN // tp, experts, self.at["ep"]) for _ in range(LAYERS // stages))
        numbers = {str(local): str(self.first_layer + local) for local in range(LAYERS // stages)}
        elastic.declare(self.layers, held_at={"pp": self.at["pp"]}, names=numbers)
        ends = nn.Module()
        if self.at["pp"] in (0, stages - 1):
            ends.embed = nn.Parameter(torch.empty(VOCABULARY // tp, WIDTH))
        elastic.declare(
            ends, cuts={"embed": {"tp": 0}} if hasattr(ends, "embed") else {}, held_at={"pp": (0, stages - 1)}
        )
        self.ends = ends


def global_names(stage: Stage) -> Iterator[tuple[str, str, int | None]]:
    """Local name, global name and the dimension that tp cuts, of every parameter and buffer: this file's own word."""
    for local in stage.state_dict():
        parts = local.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) + stage.first_layer)
            if parts[2] == "experts":
                parts[3] = str(int(parts[3]) + stage.first_expert)
        dim = {"embed": 0, "query": 0, "up": 0, "out": 1, "down": 1}.get(parts[-1])
        yield local, ".".join(parts), dim


def part_of(whole: torch.Tensor, dim: int | None, mesh: Mesh, rank: int) -> torch.Tensor:
    """This rank's part of a global tensor."""
    at = mesh.coordinate(rank)
    if dim is not None:
        whole = whole.chunk(mesh.size("tp"), dim)[at.get("tp", 0)]
    if mesh.size("dp_shard") > 1 and whole.dim():
        parts = whole.chunk(mesh.size("dp_shard"), 0)
        place = at["dp_shard"]
        whole = parts[place] if place < len(parts) else whole[:0]
    return whole


def as_dtensor(local: torch.Tensor, whole: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
    """HSDP's parameter: sharded over ``dp_shard``. Rank 0 of the group, this process, takes the place of ``rank``."""
    ranks = list(range(mesh.world_size))
    ranks[0], ranks[rank] = ranks[rank], ranks[0]
    names, sizes = zip(*mesh.axes)
    device_mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(sizes), mesh_dim_names=names, _init_backend=False)
    placements = [Shard(0) if axis == "dp_shard" and whole.dim() else Replicate() for axis in names]
    return DTensor.from_local(local, device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class World:
    """All ranks of ``mesh``, each with its part of ``weights`` and an optimizer with two groups."""

    def __init__(self, mesh: Mesh, weights: Mapping[str, torch.Tensor]) -> None:
        self.mesh = mesh
        self.stages = [Stage(mesh, rank) for rank in range(mesh.world_size)]
        self.names: list[dict[str, tuple[str, int | None]]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for rank, stage in enumerate(self.stages):
            names = {local: (name, dim) for local, name, dim in global_names(stage)}
            self.names.append(names)
            for local, (name, dim) in names.items():
                owner, _, key = local.rpartition(".")
                module, part = stage.get_submodule(owner), part_of(weights[name], dim, mesh, rank).clone()
                if mesh.size("dp_shard") > 1:
                    part = as_dtensor(part, weights[name], mesh, rank)
                setattr(module, key, nn.Parameter(part) if key in module._parameters else part)
            matrices = [p for p in stage.parameters() if p.dim() > 1]
            others = [p for p in stage.parameters() if p.dim() <= 1]
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.01, "weight_decay": 0.0}]
            self.optimizers.append(torch.optim.AdamW([g for g in groups if g["params"]], lr=0.02))

    def rank_at(self, like: int, **axes: int) -> int:
        return self.mesh.rank({**self.mesh.coordinate(like), **axes})

    def values(self) -> dict[str, list[tuple[int, int | None, torch.Tensor]]]:
        """By global name: rank, dimension and local part of every parameter, buffer and optimizer tensor."""
        found: dict[str, list[tuple[int, int | None, torch.Tensor]]] = {}
        for rank, (stage, names, optimizer) in enumerate(zip(self.stages, self.names, self.optimizers)):
            for local, tensor in stage.state_dict(keep_vars=True).items():
                name, dim = names[local]
                found.setdefault(name, []).append((rank, dim, local_of(tensor.detach())))
                for key, value in optimizer.state.get(tensor, {}).items():
                    cut = dim if value.dim() else None
                    found.setdefault(f"{name}.{key}", []).append((rank, cut, local_of(value)))
        return found

    def gathered(self) -> dict[str, torch.Tensor]:
        """Every tensor put together from the parts of the ranks; replicas must be equal."""
        whole = {}
        for name, parts in self.values().items():
            by_rank = {rank: (dim, part) for rank, dim, part in parts}
            pieces = []
            for tp in range(self.mesh.size("tp")):
                first = next(r for r in by_rank if self.mesh.coordinate(r).get("tp", 0) == tp)
                dim, piece = by_rank[first]
                if self.mesh.size("dp_shard") > 1 and piece.dim():
                    shards = [self.rank_at(first, dp_shard=at) for at in range(self.mesh.size("dp_shard"))]
                    piece = torch.cat([by_rank[r][1] for r in shards])
                pieces.append(piece)
            whole[name] = torch.cat(pieces, dim) if dim is not None else pieces[0]
        return whole

    def check_parts(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Every rank holds exactly its part of ``whole``, bit for bit."""
        values = self.values()
        assert values.keys() == whole.keys()
        for name, parts in values.items():
            for rank, dim, part in parts:
                assert torch.equal(part, part_of(whole[name], dim, self.mesh, rank)), f"{name} on rank {rank}"

    def step(self, tokens: torch.Tensor) -> float:
        """One optimizer step on ``tokens`` [samples, positions], cut over the axes that cut data. Returns the loss."""
        losses = []
        data = [axis for axis in (*DATA_AXES, "cp") if self.mesh.size(axis) > 1]
        for rank in range(self.mesh.world_size):
            at = self.mesh.coordinate(rank)
            if any(at[axis] for axis in at if axis not in data):
                continue
            samples, parts = self.mesh.place(DATA_AXES, at)
            mine = tokens.tensor_split(parts, 0)[samples]
            mine = mine.tensor_split(self.mesh.size("cp"), 1)[at.get("cp", 0)]
            if mine.numel():
                losses.append(self._loss(rank, mine) * mine.numel() / tokens.numel())
        loss = torch.stack(losses).sum()
        loss.backward()
        self._share_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    def _tensor(self, rank: int, owner: nn.Module, key: str, path: str) -> torch.Tensor:
        """A parameter as the forward pass sees it: gathered over ``dp_shard``."""
        if self.mesh.size("dp_shard") == 1 or not getattr(owner, key).dim():
            return local_of(getattr(owner, key))
        ranks = [self.rank_at(rank, dp_shard=at) for at in range(self.mesh.size("dp_shard"))]
        return torch.cat([local_of(getattr(self.stages[r].get_submodule(path), key)) for r in ranks])

    def _loss(self, rank: int, tokens: torch.Tensor) -> torch.Tensor:
        tp, stages = range(self.mesh.size("tp")), self.mesh.size("pp")
        rows = VOCABULARY // len(tp)

        def of(rank: int, path: str, key: str) -> torch.Tensor:
            return self._tensor(rank, self.stages[rank].get_submodule(path), key, path)

        one_hot = nn.functional.one_hot(tokens, VOCABULARY).to(torch.float32)
        first, last = ([self.rank_at(rank, tp=t, pp=p) for t in tp] for p in (0, stages - 1))
        x = sum(one_hot[..., t * rows : (t + 1) * rows] @ of(first[t], "ends", "embed") for t in tp)
        for number in range(LAYERS):
            stage, local = divmod(number, LAYERS // stages)
            ranks = [self.rank_at(rank, tp=t, pp=stage) for t in tp]
            path = f"layers.{local}"
            y = sum(torch.tanh(x @ of(r, path, "query").T) @ of(r, path, "out").T for r in ranks)
            x = x + y + of(ranks[0], path, "bias")
            weights = torch.softmax(x @ of(ranks[0], path, "router").T, -1)
            mixed = torch.zeros_like(x)
            for expert in range(EXPERTS):
                owner, place = divmod(expert, EXPERTS // self.mesh.size("ep"))
                holders = [self.rank_at(r, ep=owner) for r in ranks]
                below = f"{path}.experts.{place}"
                y = sum(torch.tanh(x @ of(r, below, "up").T) @ of(r, below, "down").T for r in holders)
                mixed = mixed + weights[..., expert : expert + 1] * of(holders[0], below, "scale") * y
            x = x + mixed
        scores = torch.cat([x @ of(r, "ends", "embed").T for r in last], -1)
        return nn.functional.cross_entropy(scores.flatten(0, -2), (tokens.flatten() + 1) % VOCABULARY)

    def _share_gradients(self) -> None:
        """What all-reduces would do: each holder of a part gets the sum of what its holders found."""
        parts: dict[tuple[str, int, int], list[nn.Parameter]] = {}
        for rank, (stage, names) in enumerate(zip(self.stages, self.names)):
            at = self.mesh.coordinate(rank)
            for local, parameter in stage.named_parameters():
                name, dim = names[local]
                shard = at.get("dp_shard", 0) if parameter.dim() else 0
                parts.setdefault((name, at.get("tp", 0) if dim is not None else 0, shard), []).append(parameter)
        for (name, _, _), holders in parts.items():
            found = [local_of(parameter.grad) for parameter in holders if parameter.grad is not None]
            assert found, name
            total = torch.stack(found).sum(0)
            for parameter in holders:
                grad = total.clone()
                if isinstance(parameter, DTensor):
                    grad = DTensor.from_local(
                        grad, parameter.device_mesh, parameter.placements, run_check=False,
                        shape=parameter.shape, stride=parameter.stride(),
                    )  # fmt: skip
                parameter.grad = grad


def first_weights() -> dict[str, torch.Tensor]:
    """The weights that every mesh begins with."""
    torch.manual_seed(7)
    plain = Stage(Mesh((("dp", 1),)), 0)
    return {
        name: torch.zeros(()) if name.endswith("used") else torch.randn(tensor.shape) * 0.3
        for name, tensor in plain.state_dict().items()
    }
