"""The formulas against the simulator, which knows none of them.

The models and their random jobs are those of ``tests/benchmarks/interval_models.py``; run that
by hand for 200,000 failures each.
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from policies.renewal import Weibull, lazy_schedule, schedule_efficiency
from policies.simulate import exponential, simulate_single, simulate_two_tier, weibull
from policies.two_tier import FailureModel, Tier, TwoTier

TESTS = Path(__file__).parents[1]
GOLDENS = json.loads((TESTS / "unit" / "goldens" / "policy.json").read_text())


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TESTS / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODELS = benchmark("interval_models")


@pytest.mark.parametrize("model", MODELS.MODELS, ids=lambda model: model.__name__)
def test_twenty_random_jobs_agree_with_their_simulation(model):
    rng = random.Random(f"{model.__name__}-ci")
    for number in range(20):
        name, predicted, simulate = model(rng)
        found = simulate(10_000 if "two_tier" in model.__name__ else 20_000, number)
        assert abs(found.z(predicted)) < 4, f"{name}, seed {number}: predicted {predicted}, simulated {found}"


def golden_system(name: str) -> TwoTier:
    row = next(row for row in GOLDENS["two_tier"] if row["name"] == name)
    model = FailureModel(row["l1"], row["l2"], row["l3"], row["R1"], row["R2"], row["R3"], row["D"])
    return TwoTier(Tier(row["S1"], row["L1"], row["s1"]), Tier(row["S2"], row["L2"], row["s2"]), model)


def test_the_two_tier_optimum_beats_its_neighbours_on_the_simulated_grid():
    system, row = golden_system("B1"), next(row for row in GOLDENS["two_tier"] if row["name"] == "B1")
    interval, k = row["W"], row["k"]
    best = simulate_two_tier(system, interval, k, failures=60_000, seed=1)
    for factor, periods in ((0.5, k), (2, k), (1, k // 3), (1, 4 * k), (0.5, k // 3), (2, 4 * k)):
        other = simulate_two_tier(system, interval * factor, periods, failures=20_000, seed=2)
        spread = (best.standard_error**2 + other.standard_error**2) ** 0.5
        assert best.efficiency - other.efficiency > 2 * spread, f"W x {factor}, k {periods}: {other} against {best}"


def test_uploads_that_die_with_a_node_cost_a_little():
    system, row = golden_system("A1"), next(row for row in GOLDENS["two_tier"] if row["name"] == "A1")
    found = simulate_two_tier(system, row["W"], row["k"], failures=20_000, uploads_survive=False, seed=3)
    assert found.efficiency == pytest.approx(row["eff"], abs=4 * found.standard_error + 3e-4)


def test_a_save_never_waits_for_a_write_in_flight():
    # The floor case: saves that are due every 100 s, writes of 600 s. Training goes on meanwhile.
    often = simulate_single(
        100, stall_s=2, write_s=600, restart_s=60, lifetimes=exponential(3600), failures=40_000, seed=4
    )
    assert often.efficiency == pytest.approx(0.762283, abs=4 * often.standard_error)


def test_a_lazy_schedule_is_worth_what_its_formula_says():
    law = Weibull.with_mean(11134.61, 0.6)
    schedule = lazy_schedule(law, cost_s=60, restart_s=300)
    predicted = schedule_efficiency(schedule, survival=law.survival, mean_s=law.mean_s, cost_s=60, restart_s=300)
    found = simulate_single(
        schedule, stall_s=60, restart_s=300, lifetimes=weibull(law.shape, law.scale_s), failures=60_000, seed=5
    )
    assert abs(found.z(predicted)) < 4


def test_a_wrong_prediction_is_noticed():
    found = simulate_single(
        1116.27, stall_s=60, restart_s=300, lifetimes=exponential(11134.61), failures=60_000, seed=6
    )
    assert abs(found.z(0.875829)) < 4 < abs(found.z(0.8795))


def test_the_seed_decides_everything():
    def once(seed: int) -> float:
        return simulate_single(
            900, stall_s=60, restart_s=300, lifetimes=exponential(11134.61), failures=5_000, seed=seed
        ).efficiency

    assert once(7) == once(7) != once(8)
