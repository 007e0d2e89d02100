"""Values of each rank on another mesh: found again by coordinate as long as the axes that they depend on stay."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.mesh import Mesh
from elastic.snapshot.per_rank import depends_on, per_rank, same_place

MESH = Mesh((("pp", 2), ("dp", 2), ("tp", 3)))


def test_the_axes_that_a_value_depends_on_are_found() -> None:
    ranks = range(MESH.world_size)
    assert depends_on(MESH, [0 for _ in ranks]) == ()
    assert depends_on(MESH, [MESH.coordinate(rank)["tp"] for rank in ranks]) == ("tp",)
    assert depends_on(MESH, [MESH.coordinate(rank)["tp"] * MESH.coordinate(rank)["pp"] for rank in ranks]) == (
        "pp", "tp",
    )  # fmt: skip
    assert depends_on(MESH, list(ranks)) == ("pp", "dp", "tp")


@settings(derandomize=True, deadline=None, max_examples=60)
@given(sizes=st.tuples(*[st.integers(1, 3)] * 3), dp=st.integers(1, 4), kept=st.sets(st.sampled_from(("pp", "tp"))))
def test_a_value_is_found_at_its_coordinate_whatever_becomes_of_the_other_axes(
    sizes: tuple[int, ...], dp: int, kept: set[str]
) -> None:
    old = Mesh(tuple(zip(("pp", "dp", "tp"), sizes)))
    new = Mesh((("dp", dp), ("pp", sizes[0]), ("tp", sizes[2])))
    values = [tuple(old.coordinate(rank)[axis] for axis in sorted(kept)) for rank in range(old.world_size)]
    axes = depends_on(old, values)
    for rank in range(new.world_size):
        source = same_place(old, new, rank, axes)
        assert source is not None
        assert values[source] == tuple(new.coordinate(rank)[axis] for axis in sorted(kept))


def test_a_value_that_depends_on_an_axis_of_another_size_is_found_nowhere() -> None:
    assert same_place(MESH, Mesh((("pp", 2), ("dp", 4), ("tp", 3))), 5, ("tp", "dp")) is None


def test_a_rule_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="use 'refuse', 'derive' or a function"):
        per_rank(object(), on_resize="rank0")  # type: ignore[arg-type]
