from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import CorruptSnapshot
from elastic.mesh import Mesh
from elastic.protocol.shares import ALIGNMENT_BYTES
from elastic.snapshot.layout import Layout, TensorSpec, check_tiling
from elastic.snapshot.save_plan import SaveShare, plan_key, plan_share

DP4 = Mesh((("dp", 4),))


def spec(name: str, *shape: int, itemsize: int = 4) -> TensorSpec:
    return TensorSpec(name, {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64"}[itemsize], shape, itemsize)


shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 7, 13, 64]), max_size=4).map(tuple)


@st.composite
def layouts_on_a_mesh(draw: st.DrawFn) -> tuple[list[Layout], Mesh]:
    """Cut on any dimensions, by axes one after the other or flattened, and held by all, one or some of a stage."""
    stages = draw(st.integers(1, 3))
    mesh = Mesh((("pp", stages), ("dp", draw(st.integers(1, 4))), ("tp", draw(st.integers(1, 3)))))
    layouts = []
    for number in range(draw(st.integers(0, 8))):
        shape = draw(shapes)
        axes = draw(st.sampled_from([[], ["dp"], ["tp"], ["dp", "tp"], ["tp", "dp"], [("dp", "tp")]])) if shape else []
        cuts = tuple((axis, draw(st.integers(0, len(shape) - 1))) for axis in axes)
        places = st.lists(st.integers(0, stages - 1), min_size=1, unique=True).map(lambda at: tuple(sorted(at)))
        held = draw(st.one_of(st.none(), st.integers(0, stages - 1), places))
        held_at = () if held is None else (("pp", held),)
        layouts.append(Layout(spec(f"t{number}", *shape, itemsize=draw(st.sampled_from([1, 2, 4, 8]))), cuts, held_at))
    return layouts, mesh


@settings(derandomize=True, deadline=None, max_examples=200)
@given(layouts_on_a_mesh())
def test_the_pieces_of_all_ranks_tile_every_tensor(case: tuple[list[Layout], Mesh]) -> None:
    layouts, mesh = case
    shares = [plan_share(layouts, mesh, rank) for rank in range(mesh.world_size)]
    for layout in layouts:
        pieces = [piece for share in shares for piece in share.pieces if piece.tensor == layout.spec]
        check_tiling(layout.spec, [piece.box for piece in pieces])
        assert pieces, "a tensor of no bytes is still recorded"


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(shapes, min_size=1, max_size=12), st.integers(1, 9))
def test_replicas_share_the_bytes_evenly_within_one_row(sizes: list[tuple[int, ...]], ranks: int) -> None:
    layouts = [Layout(spec(f"t{n}", *shape)) for n, shape in enumerate(sizes)]
    mesh = Mesh((("dp", ranks),))
    written = [sum(p.nbytes for p in plan_share(layouts, mesh, rank).pieces) for rank in range(ranks)]
    row = max(4 * math.prod(shape) // max(1, next((n for n in shape if n > 1), 1)) for shape in sizes)
    assert sum(written) == sum(layout.spec.nbytes for layout in layouts)
    assert all(abs(share - sum(written) / ranks) <= row + 1 for share in written)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(layouts_on_a_mesh())
def test_pieces_lie_apart_and_aligned_in_the_slot(case: tuple[list[Layout], Mesh]) -> None:
    layouts, mesh = case
    for rank in range(mesh.world_size):
        share, end = plan_share(layouts, mesh, rank), 0
        for piece in share.pieces:
            assert piece.offset % ALIGNMENT_BYTES == 0
            assert piece.offset >= end
            end = piece.offset + piece.nbytes
        assert end <= share.nbytes


def test_at_most_one_tensor_fewer_than_ranks_is_cut() -> None:
    layouts = [Layout(spec(f"t{n}", 100, 3)) for n in range(50)]
    cut = {p.tensor.name for rank in range(4) for p in plan_share(layouts, DP4, rank).pieces if p.box != p.tensor.box}
    assert len(cut) <= 3


def test_fewer_rows_than_ranks_leaves_some_ranks_without_a_piece() -> None:
    shares = [plan_share([Layout(spec("t", 2, 5))], Mesh((("dp", 7),)), rank) for rank in range(7)]
    assert sum(len(share.pieces) for share in shares) == 2


def test_a_leading_dimension_of_one_is_not_what_is_cut() -> None:
    shares = [plan_share([Layout(spec("t", 1, 1, 8, 3))], DP4, rank) for rank in range(4)]
    assert [share.pieces[0].box.shape for share in shares] == [(1, 1, 2, 3)] * 4


def test_a_scalar_is_written_by_one_rank() -> None:
    assert sum(len(plan_share([Layout(spec("step"))], DP4, rank).pieces) for rank in range(4)) == 1


def test_a_tensor_of_one_pipeline_stage_is_shared_among_the_ranks_of_that_stage() -> None:
    mesh = Mesh((("pp", 2), ("dp", 2)))
    layout = Layout(spec("layers.8.weight", 10), held_at=(("pp", 1),))
    assert [len(plan_share([layout], mesh, rank).pieces) for rank in range(4)] == [0, 0, 1, 1]
    check_tiling(layout.spec, [p.box for rank in range(4) for p in plan_share([layout], mesh, rank).pieces])


def test_the_key_changes_with_everything_that_the_plan_follows_from() -> None:
    layout = Layout(spec("t", 6, 4), (("dp", 0),))
    others = [
        plan_key([replace(layout, spec=layout.spec._replace(**change))], DP4, 0)
        for change in ({"name": "u"}, {"dtype": "int32"}, {"shape": (4, 6)}, {"itemsize": 8})
    ]
    others += [plan_key([replace(layout, cuts=(("dp", 1),))], DP4, 0), plan_key([layout], DP4, 1)]
    others += [plan_key([layout], Mesh((("dp", 2), ("tp", 2))), 0), plan_key([layout], DP4, 0, [("a", "t")])]
    others += [plan_key([replace(layout, held_at=(("dp", 0),))], DP4, 0), plan_key([layout, layout], DP4, 0)]
    assert len({plan_key([layout], DP4, 0), *others}) == len(others) + 1


@settings(derandomize=True, deadline=None, max_examples=50)
@given(layouts_on_a_mesh())
def test_a_share_survives_the_way_to_the_store(case: tuple[list[Layout], Mesh]) -> None:
    layouts, mesh = case
    share = plan_share(layouts, mesh, 0, [("tied", "t0")])
    assert SaveShare.from_bytes(share.to_bytes()) == share


@pytest.mark.parametrize("data", [b"", b"[]", b'{"key": 1}', b"\x80\x04"])
def test_what_is_no_share_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptSnapshot, match="table of pieces"):
        SaveShare.from_bytes(data)
