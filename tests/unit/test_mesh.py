"""Meshes: coordinates, groups, and what a template makes of a world size."""

from __future__ import annotations

import pytest

from elastic.errors import ConfigError
from elastic.mesh import AXES, Mesh, check_rule, check_template, largest, resolve, smallest

CUBE = Mesh((("pp", 2), ("dp", 3), ("tp", 4)))


def test_rank_and_coordinate_are_inverse_and_the_last_axis_varies_fastest() -> None:
    assert CUBE.world_size == 24
    assert [CUBE.rank(CUBE.coordinate(rank)) for rank in range(24)] == list(range(24))
    assert CUBE.coordinate(1) == {"pp": 0, "dp": 0, "tp": 1}
    assert CUBE.coordinate(23) == {"pp": 1, "dp": 2, "tp": 3}


@pytest.mark.parametrize("rank", [-1, 24])
def test_a_rank_outside_the_mesh_is_refused(rank: int) -> None:
    with pytest.raises(IndexError, match="outside a mesh of 24"):
        CUBE.coordinate(rank)


def test_groups_along_an_axis_partition_the_world() -> None:
    groups = {CUBE.group(rank, "dp") for rank in range(24)}
    assert len(groups) == 8
    assert sorted(rank for group in groups for rank in group) == list(range(24))
    assert CUBE.group(0, "dp") == (0, 4, 8)
    assert CUBE.group(5, "pp", "dp", "tp") == tuple(range(24))
    assert CUBE.group(5) == (5,)


def test_an_axis_that_is_not_named_has_size_one() -> None:
    assert CUBE.size("ep") == 1
    assert CUBE.size("tp") == 4


def test_a_free_axis_takes_what_the_world_size_leaves() -> None:
    assert resolve({"dp": -1, "tp": 2}, 6) == Mesh((("dp", 3), ("tp", 2)))
    assert resolve({"dp": -1, "tp": 2}, 5) is None
    assert resolve({"dp": 2, "tp": 2}, 4) == Mesh((("dp", 2), ("tp", 2)))
    assert resolve({"dp": 2, "tp": 2}, 8) is None
    assert resolve({"dp": -1}, 0) is None


def test_the_largest_mesh_within_bounds_is_found_or_there_is_none() -> None:
    assert largest({"dp": -1, "tp": 4}, 1, 11) == Mesh((("dp", 2), ("tp", 4)))
    assert largest({"dp": -1, "tp": 4}, 1, 3) is None
    assert largest({"dp": -1}, 3, 2) is None


@pytest.mark.parametrize(
    ("template", "cure"),
    [
        ({"data": 2}, "unknown axis 'data'; use " + ", ".join(AXES)),
        ({"dp": 0}, "needs a positive size"),
        ({"dp": -2}, "needs a positive size"),
        ({"dp": True}, "needs a positive size"),
        ({"dp": 2.0}, "needs a positive size"),
        ({"dp": -1, "tp": -1}, "only one axis can be -1"),
    ],
)
def test_a_template_that_makes_no_sense_names_the_field_and_the_cure(template: dict[str, int], cure: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_template(template)
    assert caught.value.field == "mesh"
    assert caught.value.value == template
    assert cure in str(caught.value)


def test_of_several_templates_the_largest_mesh_is_taken_and_of_equally_large_ones_the_first() -> None:
    rule = [{"dp": 4, "tp": 2}, {"dp": 2, "tp": 2}, {"dp": -1}]
    assert str(largest(rule, 1, 9)) == "dp9"
    assert str(largest(rule[:2], 1, 9)) == "dp4·tp2"
    assert str(largest(rule[:2], 1, 7)) == "dp2·tp2"
    assert str(resolve(rule, 4)) == "dp2·tp2"
    assert str(smallest(rule[:2], 1, 9)) == "dp2·tp2"
    assert smallest(rule[:2], 5, 7) is None


def test_meshes_can_be_given_by_world_size() -> None:
    rule = check_rule({2: {"dp": -1}, 8: {"dp": -1, "tp": 4}})
    assert rule == ({"dp": 2, "tp": 4}, {"dp": 2})
    assert str(largest(rule, 1, 7)) == "dp2"


@pytest.mark.parametrize(
    ("rule", "cure"),
    [
        ({8: {"dp": 2, "tp": 2}}, "is no mesh of 8 ranks"),
        ([], "or a list of those"),
        ("dp", "or a list of those"),
        ([{"dp": 2}, {}], "use a mapping of axes to sizes"),
        ([{"dp": 2}, {"data": 2}], "unknown axis 'data'"),
        ({}, "use a mapping of axes to sizes"),
        ({4: 4}, "use a mapping of axes to sizes"),
    ],
)
def test_a_rule_that_makes_no_sense_names_the_field_and_the_cure(rule: object, cure: str) -> None:
    with pytest.raises(ConfigError, match="mesh") as caught:
        check_rule(rule)
    assert cure in caught.value.cure


def test_a_mesh_prints_its_axes() -> None:
    assert str(CUBE) == "pp2·dp3·tp4"
    assert str(Mesh(())) == "1"
