"""Any tensor on any mesh comes back on any other, bit for bit: random shapes, dtypes, placements and meshes.

The parts that ranks hold are cut here by ``torch.chunk``, in the order in which FSDP2 and tensor parallelism cut.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_ranks import take_snapshot
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import elastic
from elastic.errors import CaptureError
from elastic.mesh import Mesh
from elastic.snapshot.capture import Attached
from elastic.snapshot.dtensor_layout import cuts_of
from elastic.snapshot.layout import Box, Layout, TensorSpec, check_tiling
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.restore import restore
from elastic.snapshot.tensor_layout import bits

DTYPES = [
    torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int8, torch.uint16, torch.int64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
SIZES = [0, 1, 1, 2, 3, 5, 6, 7, 9, 13]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=12, store=FakeStore())
    yield
    dist.destroy_process_group()


@dataclass(frozen=True)
class Placed:
    """How one mesh holds one tensor: which axes cut it, in what order, and whether a DTensor says so."""

    cuts: tuple[tuple[str, int], ...]
    kind: str
    stage: int | None

    def part(self, whole: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        at = mesh.coordinate(rank)
        for axis, dim in self.cuts:
            parts = whole.chunk(mesh.size(axis), dim) if whole.shape[dim] else [whole] * mesh.size(axis)
            whole = parts[at[axis]] if at[axis] < len(parts) else whole.narrow(dim, 0, 0)
        return whole.clone()

    def placements(self, mesh: Mesh) -> list[object]:
        """As torch writes it: an axis that cuts after one to its right is strided."""
        found: list[object] = [Replicate() for _ in mesh.axes]
        names = [axis for axis, _ in mesh.axes]
        for place, (axis, dim) in enumerate(self.cuts):
            before = [a for a, d in self.cuts[:place] if d == dim and names.index(a) > names.index(axis)]
            factor = math.prod(mesh.size(a) for a in before)
            found[names.index(axis)] = _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
        return found


def device_mesh(mesh: Mesh, rank: int) -> DeviceMesh:
    """``mesh`` in an order in which rank 0 of the group, this process, has the place of ``rank``."""
    ranks = list(range(mesh.world_size))
    ranks[0], ranks[rank] = ranks[rank], ranks[0]
    names, sizes = zip(*mesh.axes)
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(sizes), mesh_dim_names=names, _init_backend=False)


def module_of(wholes: dict[str, torch.Tensor], placed: dict[str, Placed], mesh: Mesh, rank: int) -> nn.Module:
    """What ``rank`` holds: one submodule for each tensor that it holds."""
    module = nn.Module()
    for name, whole in wholes.items():
        how, here = placed[name], mesh.coordinate(rank).get("pp", 0)
        held_at = {} if how.stage is None else {"pp": here}
        owner = elastic.declare(nn.Module(), held_at=held_at)
        module.add_module(name, owner)
        if how.stage not in (None, here):
            continue
        part: torch.Tensor = how.part(whole, mesh, rank)
        if how.kind == "dtensor":
            part = DTensor.from_local(
                part, device_mesh(mesh, rank), how.placements(mesh), run_check=False,
                shape=whole.shape, stride=whole.stride(),
            )  # fmt: skip
        else:
            elastic.declare(owner, cuts={"t": dict(how.cuts)}, held_at=held_at)
        owner.register_buffer("t", part)
    return module


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    axes = draw(st.sampled_from([("dp",), ("tp",), ("dp", "tp"), ("pp", "dp"), ("pp", "dp", "tp"), ("dp", "ep", "tp")]))
    sizes = draw(st.sampled_from([(1, 1, 1), (2, 2, 2), (3, 2, 1), (2, 3, 2), (4, 2, 1), (1, 3, 2), (5, 1, 2)]))
    return Mesh(tuple(zip(axes, sizes)))


@st.composite
def placed_on(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> Placed:
    stage = draw(st.none() | st.integers(0, mesh.size("pp") - 1))
    axes = [axis for axis, _ in mesh.axes if axis != "pp"]
    chosen = draw(st.lists(st.sampled_from(axes), unique=True)) if shape else []
    cuts = tuple((axis, draw(st.integers(0, len(shape) - 1))) for axis in chosen)
    even = all(shape[d] % math.prod(mesh.size(a) for a, other in cuts if other == d) == 0 for _, d in cuts)
    return Placed(cuts, draw(st.sampled_from(["dtensor", "declared"] if even else ["dtensor"])), stage)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern that the dtype has, NaNs and denormals too."""
    raw = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    if dtype == torch.bool:
        return raw[..., 0] % 2 == 0
    return raw.view(dtype).reshape(shape)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.data(), meshes(), meshes())
def test_random_tensors_come_back_on_a_random_mesh(data: st.DataObject, before: Mesh, after: Mesh) -> None:
    wholes, old, new = {}, {}, {}
    for number in range(data.draw(st.integers(1, 4))):
        shape = tuple(data.draw(st.lists(st.sampled_from(SIZES), max_size=3)))
        wholes[f"t{number}"] = random_bits(shape, data.draw(st.sampled_from(DTYPES)), number)
        old[f"t{number}"], new[f"t{number}"] = data.draw(placed_on(before, shape)), data.draw(placed_on(after, shape))
    writers = [Attached({"m": module_of(wholes, old, before, rank)}, before, rank) for rank in range(before.world_size)]
    with tempfile.TemporaryDirectory() as directory:
        tier = NodeTier(Path(directory) / "arena")
        index, source = take_snapshot(tier, writers)
        assert {spec.name: spec.shape for spec in index.table.specs} == {
            f"m.{name}.t": tuple(whole.shape) for name, whole in wholes.items()
        }
        assert index.table.total_bytes == sum(whole.nbytes for whole in wholes.values())
        empty = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
        for rank in range(after.world_size):
            module = module_of(empty, new, after, rank)
            restore(Attached({"m": module}, after, rank), index, source)
            for name, tensor in module.named_buffers():
                key = name.split(".")[0]
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                assert torch.equal(bits(local), bits(new[key].part(wholes[key], after, rank)))
        tier.close()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.data(), meshes())
def test_every_rank_knows_the_box_of_every_other_and_torch_agrees(data: st.DataObject, mesh: Mesh) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    how = data.draw(placed_on(mesh, shape))
    placements, whole = how.placements(mesh), torch.arange(math.prod(shape)).reshape(shape)
    spec = TensorSpec("t", "int64", shape, 8)
    layouts, boxes = set(), set()
    for rank in range(mesh.world_size):
        part = how.part(whole, mesh, rank)
        dtensor = DTensor.from_local(
            part, device_mesh(mesh, rank), placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        layout = Layout(spec, cuts_of("t", dtensor, mesh, rank))
        layouts.add(layout)
        box = layout.box_of(mesh, rank)
        assert part.numel() == 0 if box is None else torch.equal(part, whole[box.within(spec.box)])
        if box is not None:
            boxes.add(box)
        strided = any(isinstance(p, _StridedShard) for p in placements)
        if box is not None and box.volume and not strided:
            at = list(mesh.coordinate(rank).values())
            sizes = [size for _, size in mesh.axes]
            assert _compute_local_shape_and_global_offset(shape, sizes, at, placements) == (box.shape, box.offset)
    assert len(layouts) == 1, "all ranks say the same layout"
    check_tiling(spec, boxes)


def test_rows_that_are_interleaved_are_refused_by_name() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))
    for placements in ([_StridedShard(0, split_factor=2), Replicate()], [_StridedShard(0, split_factor=3), Shard(0)]):
        tensor = DTensor.from_local(
            torch.zeros(6), device_mesh(mesh, 0), placements, run_check=False, shape=(12,), stride=(1,)
        )
        module = nn.Module()
        module.register_buffer("t", tensor)
        with pytest.raises(CaptureError, match=r"rows interleaved.*_StridedShard.*m\.t.*redistribute"):
            Attached({"m": module}, mesh, 0)


def test_a_stage_that_shards_what_tensor_parallelism_cut_is_both() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))
    whole = torch.arange(20.0).reshape(10, 2)
    how = Placed((("tp", 0), ("dp", 0)), "dtensor", None)
    for rank in range(4):
        of_tp = whole.chunk(2)[mesh.coordinate(rank)["tp"]]
        part = of_tp.chunk(2)[mesh.coordinate(rank)["dp"]]
        module = elastic.declare(nn.Module(), cuts={"t": {"tp": 0}})
        placements = [Shard(0), Replicate()]
        module.register_buffer("t", DTensor.from_local(
            part, device_mesh(mesh, rank), placements, run_check=False, shape=of_tp.shape, stride=of_tp.stride()
        ))  # fmt: skip
        attached = Attached({"m": module}, mesh, rank)
        (found,) = attached.capture().tensors
        assert (found.layout.spec.shape, found.layout.cuts) == ((10, 2), (("tp", 0), ("dp", 0)))
        assert torch.equal(part, how.part(whole, mesh, rank))
        assert found.held == Box((rank % 2 * 5 + rank // 2 * 3, 0), tuple(part.shape))
