from __future__ import annotations

import pytest

from elastic.errors import CorruptSnapshot
from elastic.mesh import Mesh
from elastic.snapshot.layout import Box, Layout, TensorSpec, check_tiling, holders


def spec(*shape: int) -> TensorSpec:
    return TensorSpec("t", "float32", shape, 4)


def test_six_rows_over_four_ranks_are_two_each_and_none_for_the_last() -> None:
    mesh = Mesh((("dp", 4),))
    boxes = [Layout(spec(6, 2), (("dp", 0),)).box_of(mesh, rank) for rank in range(4)]
    assert boxes == [Box((0, 0), (2, 2)), Box((2, 0), (2, 2)), Box((4, 0), (2, 2)), None]
    check_tiling(spec(6, 2), [box for box in boxes if box])


def test_a_dimension_cut_by_two_axes_is_cut_in_the_order_of_the_cuts() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))
    first_tp = Layout(spec(8), (("tp", 0), ("dp", 0)))
    assert [first_tp.box_of(mesh, rank).offset for rank in range(4)] == [(0,), (4,), (2,), (6,)]


def test_holders_are_the_ranks_that_the_cuts_do_not_tell_apart() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))
    assert holders(Layout(spec(4), (("tp", 0),)), mesh) == {Box((0,), (2,)): (0, 2), Box((2,), (2,)): (1, 3)}


def test_a_gap_names_the_tensor_and_how_much_is_missing() -> None:
    with pytest.raises(CorruptSnapshot, match=r"'t'.*2 of 8 elements"):
        check_tiling(spec(8), [Box((0,), (3,)), Box((5,), (3,))])


def test_an_overlap_names_the_tensor_and_both_boxes() -> None:
    with pytest.raises(CorruptSnapshot, match=r"'t'.*\[0:4\].*\[3:8\]"):
        check_tiling(spec(8), [Box((3,), (5,)), Box((0,), (4,))])


def test_a_box_outside_of_the_tensor_is_refused() -> None:
    with pytest.raises(CorruptSnapshot, match="outside"):
        check_tiling(spec(8), [Box((0,), (9,))])


def test_axes_flattened_into_one_cut_once_and_not_one_after_the_other() -> None:
    mesh = Mesh((("dp", 2), ("cp", 2)))
    flat, nested = Layout(spec(6), ((("dp", "cp"), 0),)), Layout(spec(6), (("dp", 0), ("cp", 0)))
    assert [box and str(box) for box in (flat.box_of(mesh, r) for r in range(4))] == ["[0:2]", "[2:4]", "[4:6]", None]
    assert [str(nested.box_of(mesh, rank)) for rank in range(4)] == ["[0:2]", "[2:3]", "[3:5]", "[5:6]"]


def test_a_tensor_is_held_at_one_coordinate_or_at_several() -> None:
    mesh = Mesh((("pp", 3), ("tp", 2)))
    stage = Layout(spec(4), (("tp", 0),), (("pp", 1),))
    assert holders(stage, mesh) == {Box((0,), (2,)): (2,), Box((2,), (2,)): (3,)}
    shared = Layout(spec(4), held_at=(("pp", (0, 2)),))
    assert holders(shared, mesh) == {Box((0,), (4,)): (0, 1, 4, 5)}
