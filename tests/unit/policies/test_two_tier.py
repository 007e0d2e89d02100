"""Two tiers: goldens, constraints, and the limits in which one tier is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policies import two_tier
from policies.constraints import Box, Limits, single_tier_box
from policies.domain import PolicyError
from policies.single_tier import efficiency
from policies.two_tier import FailureModel, Tier, TwoTier, TwoTierBox, first_order, optimum

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "policy.json").read_text())


def system(row) -> TwoTier:
    model = FailureModel(row["l1"], row["l2"], row["l3"], row["R1"], row["R2"], row["R3"], row["D"])
    return TwoTier(Tier(row["S1"], row["L1"], row["s1"]), Tier(row["S2"], row["L2"], row["s2"]), model)


ROWS = {row["name"]: row for row in GOLDENS["two_tier"]}
SYSTEMS = {name: system(row) for name, row in ROWS.items()}


@pytest.mark.parametrize("name", ROWS)
def test_the_optimum_is_the_golden_one(name):
    row, best = ROWS[name], optimum(SYSTEMS[name])
    assert best.k == row["k"]
    assert best.interval_s == pytest.approx(row["W"], rel=1e-4)
    assert best.efficiency == pytest.approx(row["eff"], abs=1e-8)
    assert SYSTEMS[name].efficiency(row["W"], row["k"]) == pytest.approx(row["eff"], abs=1e-10)


@pytest.mark.parametrize("name", ROWS)
def test_the_square_roots_are_the_golden_first_order(name):
    local, remote, k = first_order(SYSTEMS[name])
    golden = ROWS[name]["first_order"]
    assert (local, remote, k) == (
        pytest.approx(golden["tauL"]),
        pytest.approx(golden["tauR"]),
        pytest.approx(golden["k"]),
    )


@pytest.mark.parametrize("row", GOLDENS["B1_grid"], ids=lambda row: f"k{row['k']}-W{row['W']}")
def test_efficiency_away_from_the_optimum_is_golden_too(row):
    assert SYSTEMS["B1"].efficiency(row["W"], row["k"]) == pytest.approx(row["eff"], abs=1e-10)


@pytest.mark.parametrize(
    ("name", "k", "value"),
    [("B1", 6, 0.897190045), ("B1", 8, 0.897507145), ("A1", 9, 0.959905459), ("A1", 11, 0.959906648)],
)
def test_the_best_interval_of_a_neighbouring_k_is_a_little_worse(name, k, value):
    assert optimum(SYSTEMS[name], fixed_k=k).efficiency == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize(
    ("golden", "box"),
    [
        ("A1_kWmin3600", TwoTierBox(remote_work=Box().at_least(3600, "floor"))),
        ("A1_Wmax100", TwoTierBox(local=Box().at_most(100, "rpo"))),
        ("A1_kWmax1200", TwoTierBox(remote_work=Box().at_most(1200, "rpo"))),
    ],
)
def test_constraints_move_both_the_interval_and_k(golden, box):
    best, row = optimum(SYSTEMS["A1"], box), GOLDENS[golden]
    assert (best.k, best.interval_s) == (row["k"], pytest.approx(row["W"], rel=1e-9))
    assert best.efficiency == pytest.approx(row["eff"], abs=1e-8)
    assert best.binding is not None


@pytest.mark.parametrize(("name", "value"), [("B1", 0.797643), ("B2", 0.877507), ("A1", 0.888401), ("A2", 0.979814)])
def test_the_remote_tier_alone_is_worth_what_it_is_worth(name, value):
    assert SYSTEMS[name].best_remote_only()[1] == pytest.approx(value, abs=1e-6)


def test_one_save_a_period_and_only_class_three_is_one_tier():
    model = FailureModel(0, 0, 1 / 7200, 1, 1, 600, 20)
    one = TwoTier(Tier(10), Tier(60), model)
    assert one.efficiency(900, 1) == pytest.approx(
        efficiency(900, cost_s=70, mtbf_s=7200, restart_s=600, downtime_s=20), rel=1e-12
    )


def test_a_free_remote_tier_that_is_never_needed_leaves_the_local_one():
    model = FailureModel(1 / 7200, 0, 1e-12 / 7200, 30, 30, 600)
    local = TwoTier(Tier(10), Tier(0), model)
    assert local.efficiency(400, 5) == pytest.approx(efficiency(400, cost_s=10, mtbf_s=7200, restart_s=30), rel=1e-6)


@pytest.mark.parametrize("name", ROWS)
def test_where_the_time_goes_adds_up(name):
    lost = SYSTEMS[name].lost_time(ROWS[name]["W"], ROWS[name]["k"])
    assert lost.useful + lost.save + lost.rework + lost.restart + lost.latency == pytest.approx(1, abs=1e-12)
    assert min(lost.save, lost.rework, lost.restart) > 0 <= lost.latency


def test_without_a_need_for_the_remote_tier_only_an_rpo_sets_k():
    quiet = TwoTier(Tier(2), Tier(30), FailureModel(1e-4, 1e-4, 0, 30, 30, 300))
    with pytest.raises(PolicyError) as caught:
        optimum(quiet)
    assert caught.value.code == "E_NO_REMOTE_RATE"
    best = optimum(quiet, TwoTierBox(remote_wall=Box().at_most(3600, "rpo_remote")))
    assert best.k * (best.interval_s + 2) <= 3600 * (1 + 1e-9)


def test_without_local_failures_every_save_goes_to_the_remote_tier():
    assert optimum(TwoTier(Tier(2), Tier(30), FailureModel(0, 0, 1e-4, 30, 30, 300))).k == 1


def test_an_optimum_hundreds_of_periods_from_the_guess_is_found_in_a_few_searches(monkeypatch):
    # Writing costs so much of the work beside it that the square roots are of no use here.
    failures = FailureModel(2.6e-4, 8.4e-4, 2.6e-5, 10, 5, 1e-6)
    far = TwoTier(Tier(1.05, 0.0, 0.989), Tier(0.0, 10_000.0, 0.495), failures)
    wall = Box().at_least(11_000, "in_flight_remote")
    box = TwoTierBox(local=Box(), remote_wall=wall)
    searches = []
    search = two_tier._best_interval
    monkeypatch.setattr(two_tier, "_best_interval", lambda *args: searches.append(args) or search(*args))
    best = optimum(far, box)
    assert len(searches) < 60
    for k in (best.k - 1, best.k + 1):
        assert optimum(far, box, fixed_k=k).efficiency <= best.efficiency
    _, start = two_tier._start(far, box)
    assert abs(best.k - start) > 500


def test_constraints_that_exclude_each_other_are_refused():
    with pytest.raises(PolicyError) as caught:
        optimum(SYSTEMS["A1"], TwoTierBox(local=Box().at_least(500, "floor"), remote_work=Box().at_most(100, "rpo")))
    assert caught.value.code == "E_EMPTY_RANGE"


@pytest.mark.parametrize(
    ("write", "rpo", "highest", "least"),
    [(60, 600, 538, None), (300, 600, None, 602), (60, 120, None, 122), (60, 122, 60, None)],
)
def test_an_rpo_bounds_the_period_or_is_refused_with_the_least_achievable(write, rpo, highest, least):
    box = single_tier_box(2, write, 0, Limits(rpo_s=rpo))
    if highest is not None:
        assert (box.high, box.high_name, box.findings) == (highest, "rpo", ())
    else:
        assert [finding.code for finding in box.findings] == ["R_RPO"]
        assert f"least achievable RPO is {least} s" in box.findings[0].message


def test_constraints_apply_in_order_and_a_later_one_loses():
    box = single_tier_box(2, 60, 0, Limits(rpo_s=600, budget=0.001, min_s=100, max_s=400))
    assert (box.low, box.low_name, box.high, box.high_name) == (100, "min", 400, "max")
    assert [finding.code for finding in box.findings] == ["W_CONSTRAINT_LOST"], (
        "the budget asks for more than the RPO allows"
    )


def test_a_slow_upload_channel_throttles():
    box = single_tier_box(2, 60, 0, Limits(throttle_period_s=1000))
    assert (box.low, box.low_name) == (998, "throttle")


def test_the_p95_of_a_write_counts_with_a_margin():
    assert single_tier_box(2, 60, 0.05, Limits(write_p95_s=100)).low == pytest.approx(0.95 * 100 * 1.1)
