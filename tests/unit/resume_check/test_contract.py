"""The error contract: what may differ, by how much, and on which other mesh it is tried."""

from __future__ import annotations

import math

import pytest

from elastic.errors import ConfigError
from elastic.mesh import Mesh
from elastic.resume_check.contract import ErrorContract, another_mesh, relative


def test_another_mesh_has_another_number_of_data_parallel_ranks_and_even_shares() -> None:
    assert str(another_mesh(Mesh((("dp", 6),)))) == "dp3"
    assert str(another_mesh(Mesh((("dp", 3), ("tp", 2))))) == "dp1·tp2"
    assert str(another_mesh(Mesh((("dp", 1),)))) == "dp2"
    assert str(another_mesh(Mesh((("pp", 2), ("dp", 1))))) == "pp2·dp2"
    assert str(another_mesh(Mesh((("dp_replicate", 1), ("dp_shard", 4))))) == "dp_replicate1·dp_shard2"
    assert str(another_mesh(Mesh((("ep", 3),)))) == "ep1"
    assert str(another_mesh(Mesh((("dp_replicate", 2), ("dp_shard", 2))))) == "dp_replicate1·dp_shard2"


def test_another_mesh_has_no_axis_that_the_train_function_does_not_know() -> None:
    assert str(another_mesh(Mesh((("tp", 4),)))) == "tp2"
    assert str(another_mesh(Mesh((("pp", 2), ("tp", 1))))) == "pp1·tp1"
    assert str(another_mesh(Mesh(()))) == "dp2"


def test_a_difference_is_relative_and_nothing_is_near_a_number_that_is_none() -> None:
    assert relative(1.0, 1.0) == relative(0.0, 0.0) == 0.0
    assert relative(1.0, 0.9) == pytest.approx(0.1)
    assert relative(math.nan, 1.0) == relative(math.inf, 1.0) == math.inf


def test_a_tolerance_can_be_changed_by_name_and_nothing_else() -> None:
    assert ErrorContract(loss=1e-3).changed({"update": 0.5}) == ErrorContract(loss=1e-3, update=0.5)
    with pytest.raises(ConfigError, match="use loss, outputs, gradient_norm, update"):
        ErrorContract().changed({"speed": 1.0})
    for wrong in (-1.0, math.inf, math.nan, "small"):
        with pytest.raises(ConfigError, match="loss"):
            ErrorContract(loss=wrong)  # type: ignore[arg-type]
