"""The exact interval and its relatives, against goldens computed independently."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from policies.single_tier import (
    budget,
    daly,
    efficiency,
    efficiency_unreliable,
    exact,
    exact_unreliable,
    finite_job,
    lost_time,
    young,
)

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "policy.json").read_text())


@pytest.mark.parametrize("row", GOLDENS["single"], ids=lambda row: f"C{row['C']}-M{row['M']}")
def test_young_daly_and_exact_give_the_golden_intervals(row):
    assert young(row["C"], row["M"]) == pytest.approx(row["young"], rel=1e-12)
    assert daly(row["C"], row["M"]) == pytest.approx(row["daly"], rel=1e-12)
    interval = exact(row["C"], row["M"])
    assert interval == pytest.approx(row["exact"], rel=1e-9)
    assert efficiency(interval, cost_s=row["C"], mtbf_s=row["M"], restart_s=row["R"]) == pytest.approx(
        row["eff"], abs=1e-10
    )


@pytest.mark.parametrize("row", GOLDENS["xi"], ids=lambda row: f"c{row['xi']}")
def test_the_optimum_depends_on_cost_over_mtbf_alone(row):
    assert exact(row["xi"], 1.0) == pytest.approx(row["tau_over_M"], rel=1e-9)
    assert 1 - exact(row["xi"], 1.0) == pytest.approx(row["eff_R0"], abs=1e-10)


def test_the_series_has_the_published_coefficients():
    # W/M = sum of coefficient * sqrt(2c)^n; read off one by one where the others are below rounding.
    total, root = 0.0, 0.1
    for coefficient in reversed(GOLDENS["series"]):
        total = (total + coefficient) * root
    assert exact(root * root / 2, 1.0) == pytest.approx(total, rel=1e-14)


def test_no_digits_are_lost_where_saves_are_nearly_free():
    for ratio in (1e-16, 1e-14, 1e-12, 1e-8):
        root = math.sqrt(2 * ratio)
        assert exact(ratio, 1.0) == pytest.approx(root - root**2 / 3 + root**3 / 36 + root**4 / 270, rel=1e-11)


def test_the_series_and_the_iteration_meet_where_one_takes_over():
    below, above = exact(1e-2 * (1 - 1e-9), 1.0), exact(1e-2 * (1 + 1e-9), 1.0)
    # d ln W / d ln c is 0.473 there; a seam would show as a difference beyond that of the argument.
    assert above / below - 1 == pytest.approx(2e-9 * 0.473, abs=5e-12)


def test_a_save_that_costs_a_thousand_mtbfs_leaves_one_mtbf():
    assert exact(1000.0, 1.0) == 1.0


def test_an_interval_at_the_edge_of_what_a_number_holds_is_worth_its_share_of_useful_time():
    least = 5e-324
    assert efficiency(least, cost_s=0.0, mtbf_s=100.0) == 1.0
    assert efficiency(least, cost_s=least, mtbf_s=100.0, downtime_s=100.0) == 0.25
    assert efficiency_unreliable(least, usable=0.5, cost_s=0.0, mtbf_s=100.0) == 1.0
    assert lost_time(least, cost_s=0.0, mtbf_s=100.0).useful == 1.0


def test_a_save_far_above_the_mtbf_that_may_be_broken_too_is_worth_nothing():
    assert efficiency_unreliable(1.0, usable=0.5, cost_s=1000.0, mtbf_s=1.0) == 0.0


@pytest.mark.parametrize("row", GOLDENS["finite"], ids=lambda row: f"T{row['Ts']}-M{row['M']}")
def test_a_finite_job_is_cut_into_the_golden_number_of_segments(row):
    plan = finite_job(row["Ts"], cost_s=row["C"], mtbf_s=row["M"], restart_s=row["R"])
    assert plan.segments == row["N"]
    assert plan.expected_s == pytest.approx(row["E"], rel=1e-10)
    assert plan.segments * plan.interval_s == pytest.approx(row["Ts"])


def test_a_frequently_failing_finite_job_has_its_golden_length():
    plan = finite_job(1_800_000, cost_s=300, mtbf_s=900, restart_s=600)
    assert (plan.segments, plan.expected_s) == (3273, pytest.approx(9014972.93, abs=0.01))


@pytest.mark.parametrize(
    ("usable", "interval", "value"), [(0.9, 1018.75735, 0.866572587), (0.5, 664.70570, 0.812864356)]
)
def test_saves_that_may_be_broken_are_taken_more_often(usable, interval, value):
    found = exact_unreliable(60, 11134.61, usable)
    assert found == pytest.approx(interval, rel=1e-4)
    assert efficiency_unreliable(found, usable=usable, cost_s=60, mtbf_s=11134.61, restart_s=300) == pytest.approx(
        value, abs=1e-8
    )


def test_reliable_saves_are_the_plain_model():
    assert exact_unreliable(60, 11134.61, 1.0) == exact(60, 11134.61)
    assert efficiency_unreliable(900, usable=1.0, cost_s=60, mtbf_s=11134.61, restart_s=300) == pytest.approx(
        efficiency(900, cost_s=60, mtbf_s=11134.61, restart_s=300), abs=1e-14
    )


@pytest.mark.parametrize(
    ("factor", "value"),
    [(0.25, 0.789029), (0.5, 0.854760), (0.8, 0.873654), (1, 0.875829), (1.25, 0.873621), (2, 0.853700), (4, 0.778519)],
)
def test_the_optimum_is_as_flat_as_computed(factor, value):
    interval = factor * exact(60, 11134.61)
    assert efficiency(interval, cost_s=60, mtbf_s=11134.61, restart_s=300) == pytest.approx(value, abs=1e-6)


def test_a_budget_keeps_the_cost_within_its_share():
    interval = budget(6.0, 0.05)
    assert 6.0 / (interval + 6.0) == pytest.approx(0.05)


def test_where_the_time_goes_adds_up_to_all_of_it():
    found = lost_time(1116.27, cost_s=60, mtbf_s=11134.61, restart_s=300, latency_s=57, downtime_s=20)
    assert found.useful + found.save + found.rework + found.restart + found.latency == pytest.approx(1.0, abs=1e-12)
    assert found.useful == pytest.approx(
        efficiency(1116.27, cost_s=60, mtbf_s=11134.61, restart_s=357, downtime_s=20), abs=1e-12
    )
    assert min(found.save, found.rework, found.restart, found.latency) > 0
