"""The failure rate: posteriors, exact intervals, forgetting, shares."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from policies.domain import PolicyError
from policies.presets import PRESETS, preset, spot_notice
from policies.reliability import (
    DEFAULT_PRIOR,
    DEFAULT_SHARES,
    ClassShares,
    GammaRate,
    forgotten,
    half_life_s,
    rate_interval,
    rate_upper_bound_without_failures,
)

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "policy.json").read_text())
HOUR_S = 3600.0
PRIOR_RATE = 6.5 / 1000 / 86400


@pytest.mark.parametrize("row", GOLDENS["chi2"], ids=lambda row: f"n{row['n']}")
def test_exact_confidence_intervals_are_golden(row):
    found = rate_interval(row["n"], row["T"])
    assert (found.rate, found.low, found.high) == (
        pytest.approx(row["rate"], rel=1e-9),
        pytest.approx(row["lo"], rel=1e-9),
        pytest.approx(row["hi"], rel=1e-9),
    )


def test_no_failure_has_a_one_sided_bound():
    assert rate_upper_bound_without_failures(100) == pytest.approx(0.0299573227, rel=1e-8)


@pytest.mark.parametrize(
    ("worth", "failures", "nodes", "hours", "mtbf", "low", "high"),
    [
        (1, 0, 64, 48, 105.692308, 28.65160, 4174.62),
        (1, 2, 64, 48, 35.230769, 14.62933, 170.837),
        (2, 5, 128, 24, 11.670330, 6.25541, 29.02693),
    ],
)
def test_the_posterior_has_the_golden_mtbf_and_credible_interval(worth, failures, nodes, hours, mtbf, low, high):
    belief = GammaRate.prior(PRIOR_RATE, worth).observe(failures, nodes * hours * HOUR_S)
    assert belief.mtbf_s(nodes) / HOUR_S == pytest.approx(mtbf, rel=1e-6)
    found = belief.mtbf_interval_s(nodes)
    assert found[0] / HOUR_S == pytest.approx(low, rel=1e-5)
    assert found[1] / HOUR_S == pytest.approx(high, rel=1e-5)


@pytest.mark.parametrize(("failures", "probability"), [(0, 0.990627), (2, 0.972144)])
def test_the_chance_of_a_quiet_hour_is_predictive(failures, probability):
    belief = GammaRate.prior(PRIOR_RATE).observe(failures, 64 * 48 * HOUR_S)
    assert belief.no_failure_probability(64, HOUR_S) == pytest.approx(probability, abs=1e-6)


def test_the_default_prior_is_worth_one_failure_and_three_observed_ones_outweigh_it():
    assert DEFAULT_PRIOR.alpha == 1
    assert DEFAULT_PRIOR.mtbf_s(2048) == pytest.approx(preset("meta-rsc1").mtbf_s(2048))
    after = DEFAULT_PRIOR.observe(30, 30 / (10 * PRIOR_RATE))
    assert after.rate_per_node_s == pytest.approx(10 * PRIOR_RATE, rel=0.35)


def test_decay_keeps_the_mean_and_lowers_its_worth():
    belief = DEFAULT_PRIOR.observe(9, 1e7)
    faded = belief.decayed(0.25)
    assert faded.rate_per_node_s == pytest.approx(belief.rate_per_node_s)
    assert faded.alpha == pytest.approx(2.5)


def test_forgetting_weighs_events_and_exposure_by_their_age():
    failures, exposure = forgotten([10, 30, 200, 210], now_s=240, half_life=168)
    assert failures == pytest.approx(2.539036425, rel=1e-9)
    assert exposure == pytest.approx(152.33163, rel=1e-7)
    assert (exposure + 100) / (failures + 1) == pytest.approx(71.29952894, rel=1e-8)


def test_the_half_life_keeps_thirty_failures_between_a_day_and_a_month():
    assert half_life_s(60) == 86400
    assert half_life_s(3 * HOUR_S) == pytest.approx(30 * math.log(2) * 3 * HOUR_S)
    assert half_life_s(1e9) == 30 * 86400


def test_class_shares_start_from_the_prior_and_follow_the_counts():
    assert DEFAULT_SHARES.mean == pytest.approx((0.20, 0.77, 0.03))
    assert ClassShares(2, 7.7, 0.3).observe(process=10).mean == pytest.approx((12 / 20, 7.7 / 20, 0.3 / 20))
    assert DEFAULT_SHARES.observe_counts({"domain": 10, "user": 99}).mean[2] == pytest.approx(10.3 / 20)


def test_impossible_exposure_is_refused():
    for bad in (0, -1, math.nan):
        with pytest.raises(PolicyError):
            rate_interval(3, bad)
    with pytest.raises(PolicyError):
        rate_interval(-1, 10)


@pytest.mark.parametrize(
    ("name", "nodes", "mtbf_h"),
    [
        ("llama3-405b", 2048, 3.09308),
        ("meta-rsc1", 2048, 1.8029),
        ("opt-175b", 124, 13.714),
        ("crusoe-h200", 200, 14.28),
        ("lanl-18", 1024, 7.335),
    ],
)
def test_presets_give_the_published_mtbf(name, nodes, mtbf_h):
    assert preset(name).mtbf_s(nodes) / HOUR_S == pytest.approx(mtbf_h, rel=1e-3)


def test_every_preset_names_its_source_and_its_caveat():
    assert len(PRESETS) >= 6
    for entry in PRESETS.values():
        assert len(entry.source) > 10 < len(entry.caveat) + 10
        assert 1 < entry.per_1000_node_days < 20
        if entry.failures is not None and entry.node_days is not None:
            assert 1000 * entry.failures / entry.node_days == pytest.approx(entry.per_1000_node_days)


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(PolicyError, match="llama3-405b"):
        preset("gpt-5")
    with pytest.raises(PolicyError, match="aws-spot"):
        spot_notice("tuesday")
