"""The chooser: policies by name, constraints in their order, and a reason for everything."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from policies.domain import PolicyError, refusals
from policies.interval import choose, exact, young

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "policy.json").read_text())
JOB = {"cost_s": 60.0, "mtbf_s": 11134.61, "restart_s": 300.0}


@pytest.mark.parametrize("row", GOLDENS["async"], ids=lambda row: f"S{row['S']}-L{row['L']}")
def test_a_background_write_costs_its_stall_and_its_slowdown(row):
    choice = choose(cost_s=row["S"], mtbf_s=row["M"], restart_s=row["R"], latency_s=row["L"], slowdown=row["s"])
    assert choice.visible_cost_s == pytest.approx(row["a"])
    assert choice.interval_s == pytest.approx(row["W"], rel=1e-9)
    assert choice.efficiency == pytest.approx(row["eff"], abs=1e-10)
    assert choice.effective_restart_s - choice.restart_s == pytest.approx(row["floor"])


def test_one_write_in_flight_holds_the_interval_and_says_so():
    choice = choose(cost_s=2, mtbf_s=3600, restart_s=60, latency_s=600)
    assert choice.wanted_s == pytest.approx(118.67, abs=0.01)
    assert (choice.interval_s, choice.binding) == (600, "in_flight")
    assert choice.efficiency == pytest.approx(0.762283, abs=1e-6)
    assert "W_STORAGE_BOUND" in {finding.code for finding in choice.findings}


def test_continuous_saving_sits_at_the_floor():
    choice = choose("continuous", cost_s=2, mtbf_s=11134.61, restart_s=180, latency_s=60, slowdown=0.05)
    assert choice.interval_s == pytest.approx(57)
    assert choice.efficiency == pytest.approx(0.8975, abs=5e-5)


def test_named_policies_give_their_own_interval():
    assert choose("young", **JOB).interval_s == young(60, 11134.61)
    assert choose("auto", **JOB).interval_s == choose("exact", **JOB).interval_s == exact(60, 11134.61)
    assert choose(600, **JOB).interval_s == choose("fixed:600", **JOB).interval_s == 600
    assert choose("budget:0.05", **JOB).interval_s == pytest.approx(60 * 19)


def test_minimum_and_maximum_are_kept_and_named():
    assert (choose(**JOB, max_s=500).interval_s, choose(**JOB, max_s=500).binding) == (500, "max")
    assert (choose(**JOB, min_s=5000).interval_s, choose(**JOB, min_s=5000).binding) == (5000, "min")


def test_a_maximum_below_a_write_in_flight_gives_way_and_is_reported():
    choice = choose(cost_s=2, mtbf_s=3600, latency_s=600, max_s=100)
    assert (choice.interval_s, choice.binding) == (600, "in_flight")
    assert "W_MAX_BELOW_FLOOR" in {finding.code for finding in choice.findings}


def test_steps_are_the_better_of_the_two_neighbours_and_at_least_one():
    assert choose(**JOB, step_time_s=7).steps == 159
    assert choose(**JOB, step_time_s=100_000).steps == 1
    assert choose(cost_s=2, mtbf_s=3600, latency_s=600, step_time_s=7).steps == 86, "85 steps would end inside a write"


def test_a_hopeless_case_is_answered_and_refused():
    choice = choose(cost_s=7200, mtbf_s=3600)
    assert choice.interval_s == pytest.approx(3411.111, abs=1e-3)
    assert [finding.code for finding in refusals(choice.findings)] == ["R_COST"]
    assert [finding.code for finding in refusals(choose(cost_s=1, mtbf_s=100, restart_s=300).findings)] == ["R_RESTART"]


def test_free_saves_are_taken_at_every_step():
    choice = choose(cost_s=0, mtbf_s=3600, step_time_s=2)
    assert (choice.interval_s, choice.steps) == (2, 1)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"cost_s": -1}, "E_NEGATIVE"),
        ({"cost_s": math.nan}, "E_NOT_FINITE"),
        ({"mtbf_s": 0}, "E_NOT_POSITIVE"),
        ({"mtbf_s": math.inf}, "E_NOT_FINITE"),
        ({"mtbf_s": "often"}, "E_NOT_A_NUMBER"),
        ({"restart_s": -1}, "E_NEGATIVE"),
        ({"slowdown": 1}, "E_SLOWDOWN"),
        ({"step_time_s": 0}, "E_NOT_POSITIVE"),
        ({"min_s": 10, "max_s": 5}, "E_EMPTY_RANGE"),
        ({"policy": "hourly"}, "E_POLICY"),
        ({"policy": "fixed:soon"}, "E_POLICY"),
        ({"policy": "young:3"}, "E_POLICY"),
        ({"policy": "budget:1.5"}, "E_FRACTION"),
    ],
)
def test_values_without_meaning_are_refused_with_their_code(change, code):
    with pytest.raises(PolicyError) as caught:
        choose(**{**JOB, **change})
    assert caught.value.code == code
    assert code in str(caught.value)


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ({"cost_s": 1800, "mtbf_s": 3600}, "W_COST_HALF"),
        ({"cost_s": 400, "mtbf_s": 3600}, "W_COST_TENTH"),
        ({"cost_s": 1, "mtbf_s": 3600, "restart_s": 2000}, "W_RESTART_LONG"),
        ({"cost_s": 200, "mtbf_s": 3600}, "W_LOW_EFFICIENCY"),
        ({"cost_s": 1, "mtbf_s": 3600, "step_time_s": 30}, "W_FEW_STEPS"),
    ],
)
def test_doubtful_cases_are_answered_with_a_warning(job, code):
    assert code in {finding.code for finding in choose(**job).findings}
