"""The online loop through a month whose failure rate triples, and through the small events of a run's life."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "online_interval.py"


@pytest.fixture(scope="module")
def month():
    spec = importlib.util.spec_from_file_location("online_interval", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.month


@pytest.mark.parametrize("seed", range(5))
def test_a_month_of_changing_rates_is_within_a_point_of_hindsight(month, seed):
    found = month(seed)
    assert found["points"] > -1.0, found
    assert 3 <= found["changes"] < 100, found
