"""Diagnostics, renewal laws, fleets and notices, against published or independently computed numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from policies.diagnostics import (
    burst_share,
    decluster,
    dispersion,
    lemon_nodes,
    rate_change_p,
    squared_variation,
    trend,
    weibull_fit,
)
from policies.domain import PolicyError
from policies.fleet import (
    FleetRate,
    double_loss_rate,
    fit_fleet,
    goodput_at_scale,
    groups_survive,
    ring_survives,
    triple_loss_rate,
)
from policies.preemption import final_save, predicted_interval, should_act_on_prediction, unnoticed_mtbf_s
from policies.renewal import Weibull, lazy_schedule, renewal_efficiency, renewal_optimum, schedule_efficiency
from policies.single_tier import efficiency, exact

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "policy.json").read_text())
PLANE_7910 = [74, 57, 48, 29, 502, 12, 70, 21, 29, 386, 59, 27, 153, 26, 326]  # Proschan 1963
NODE_RATE = 6.5e-3 / 86400
DAY_S = 86400.0


def test_a_weibull_fit_gives_the_golden_shape_and_scale():
    fit = weibull_fit(PLANE_7910)
    assert (fit.shape, fit.scale) == (pytest.approx(0.888487320, rel=1e-8), pytest.approx(113.299556, rel=1e-8))
    assert (fit.likelihood_ratio, fit.p) == (pytest.approx(0.408881438, rel=1e-7), pytest.approx(0.5225, abs=5e-5))
    assert fit.shape_low < fit.shape < fit.shape_high


def test_a_censored_life_lengthens_the_scale():
    fit = weibull_fit(PLANE_7910, [200])
    assert (fit.shape, fit.scale) == (pytest.approx(0.887776731, rel=1e-8), pytest.approx(127.435042, rel=1e-8))


def test_a_fit_does_not_depend_on_the_unit():
    hours = weibull_fit([t / 3600 for t in PLANE_7910])
    assert hours.shape == pytest.approx(weibull_fit(PLANE_7910).shape, rel=1e-10)


@pytest.mark.parametrize("lives", [[], [5.0], [3.0, 3.0, 3.0], [1.0, 0.0], [1.0, math.nan]])
def test_a_shape_is_not_fitted_to_too_little(lives):
    with pytest.raises(PolicyError):
        weibull_fit(lives)


def test_a_rising_rate_is_a_trend():
    found = trend([10, 22, 31, 38, 44, 49, 53, 56, 58, 59], 60)
    assert (found.u, found.p, found.beta) == (
        pytest.approx(2.19089023, rel=1e-8),
        pytest.approx(0.02846, abs=1e-5),
        pytest.approx(2.14196484, rel=1e-8),
    )


def test_uneven_counts_are_overdispersed():
    found = dispersion([3, 0, 1, 5, 2, 0, 7, 1, 0, 4])
    assert (found.chi2, found.degrees) == (pytest.approx(22.652174, abs=1e-6), 9)
    assert (found.p, found.fano) == (pytest.approx(0.0070266, abs=1e-7), pytest.approx(2.5169, abs=1e-4))


@pytest.mark.parametrize(("windows", "p"), [((20, 100, 8, 10), 0.00274250), ((419, 1296, 5, 24), 0.4634)])
def test_a_change_of_rate_between_two_windows_has_its_exact_p(windows, p):
    assert rate_change_p(*windows) == pytest.approx(p, rel=1e-4)


def test_a_storm_counts_once_even_if_it_lasts():
    assert decluster([0, 50, 100, 150, 1000, 1059, 3000], 60) == [0, 1000, 3000]
    assert burst_share([0, 50, 100, 150, 1000, 1059, 3000], 60) == pytest.approx(4 / 6)


def test_even_gaps_vary_less_than_chance_and_mixed_ones_more():
    assert squared_variation([10, 10, 10]) == 0
    assert squared_variation([1, 1, 1, 1, 96]) > 2


def test_a_lemon_is_found_and_the_others_are_not():
    found = lemon_nodes({"n1": 9, "n2": 1, "n3": 2, "n4": 1}, 16)
    assert [lemon.node for lemon in found] == ["n1"]
    assert lemon_nodes({"n1": 2, "n2": 1, "n3": 2}, 16) == ()


@pytest.mark.parametrize("row", GOLDENS["weibull"], ids=lambda row: f"a{row['a']}-k{row['shape']}")
def test_the_renewal_formula_is_golden_for_weibull_lives(row):
    law = Weibull.with_mean(row["M"], row["shape"])
    job = {"survival": law.survival, "mean_s": row["M"], "cost_s": row["a"], "restart_s": row["R"]}
    assert renewal_efficiency(row["W"], **job) == pytest.approx(row["eta"], abs=1e-10)
    best = renewal_optimum(**job)
    assert best == pytest.approx(row["best_W"], rel=1e-4)
    assert renewal_efficiency(best, **job) == pytest.approx(row["best_eta"], abs=1e-10)


def test_shape_one_is_the_exponential_model():
    law = Weibull.with_mean(11134.61, 1.0)
    assert renewal_efficiency(
        900, survival=law.survival, mean_s=law.mean_s, cost_s=60, restart_s=300, downtime_s=30
    ) == pytest.approx(efficiency(900, cost_s=60, mtbf_s=11134.61, restart_s=300, downtime_s=30), abs=1e-12)


def test_a_very_long_tail_is_summed_to_the_end():
    # A million saves fit into one mean life.
    law = Weibull.with_mean(1e6, 1.0)
    assert renewal_efficiency(0.9, survival=law.survival, mean_s=1e6, cost_s=0.1) == pytest.approx(
        efficiency(0.9, cost_s=0.1, mtbf_s=1e6), rel=1e-6
    )


def test_a_lazy_schedule_grows_as_the_hazard_falls_and_earns_its_keep():
    law = Weibull.with_mean(11134.61, 0.7)
    schedule = lazy_schedule(law, cost_s=60, restart_s=300)
    assert [round(schedule[index]) for index in (0, 1, 9)] == [806, 916, 1230]
    job = {"survival": law.survival, "mean_s": law.mean_s, "cost_s": 60, "restart_s": 300}
    assert schedule_efficiency(schedule, **job) == pytest.approx(0.882443, abs=2e-6)
    assert schedule_efficiency([900.0] * 3, **job) == pytest.approx(renewal_efficiency(900.0, **job), abs=1e-12)


@pytest.mark.parametrize(
    ("nodes", "exposed_s", "days", "pairs", "ring"),
    [(2048, 300, 54, 0.0160931, 0.0319272), (2048, 1800, 54, 0.0927561, 0.1769086)],
)
def test_independent_double_losses_are_rare(nodes, exposed_s, days, pairs, ring):
    for is_ring, golden in ((False, pairs), (True, ring)):
        rate = double_loss_rate(NODE_RATE, nodes, exposed_s, ring=is_ring)
        assert -math.expm1(-rate * days * DAY_S) == pytest.approx(golden, rel=1e-5)


def test_triple_losses_hardly_exist():
    assert triple_loss_rate(NODE_RATE, 2048, 300) * 54 * DAY_S == pytest.approx(7.3e-7, rel=0.01)
    assert -math.expm1(-double_loss_rate(NODE_RATE, 128, 300) * 30 * DAY_S) == pytest.approx(5.63175e-4, rel=1e-5)


@pytest.mark.parametrize(
    ("nodes", "lost", "groups", "ring"),
    [(16, 2, 0.933333, 0.866667), (16, 3, 0.8, 0.628571), (64, 8, 0.608356, 0.366778)],
)
def test_pairs_survive_more_than_a_ring(nodes, lost, groups, ring):
    assert groups_survive(nodes, lost) == pytest.approx(groups, abs=1e-6)
    assert ring_survives(nodes, lost) == pytest.approx(ring, abs=1e-6)


def test_a_fleet_has_a_part_that_scales_and_one_that_does_not():
    fleet = FleetRate(1e-6, 1e-5)
    assert fit_fleet([(1, fleet.mtbf_s(1)), (64, fleet.mtbf_s(64)), (512, fleet.mtbf_s(512))]) == FleetRate(
        pytest.approx(1e-6), pytest.approx(1e-5)
    )
    assert fit_fleet([(1, 47.7 * DAY_S), (128, 7.9 * 3600)]).common_per_s == 0, "a negative common rate is none"
    with pytest.raises(PolicyError):
        fit_fleet([(8, 3600.0)])


def test_goodput_falls_with_scale_and_never_above_what_free_saves_give():
    fleet = FleetRate(NODE_RATE)

    def best(mtbf: float, factor: float) -> tuple[float, int, float]:
        if factor == 0:
            return 0.0, 1, math.exp(-120 / mtbf)
        interval = exact(30 * factor, mtbf)
        return interval, 1, efficiency(interval, cost_s=30 * factor, mtbf_s=mtbf, restart_s=120)

    points = goodput_at_scale([64, 256, 1024, 4096], fleet, best)
    assert [point.goodput for point in points] == sorted((point.goodput for point in points), reverse=True)
    assert all(point.goodput < point.half_cost < point.free for point in points)


@pytest.mark.parametrize(("recall", "interval"), [(0.5, 1634.719), (0.8, 2584.718), (0.95, 5169.435)])
def test_predicted_failures_lengthen_the_interval(recall, interval):
    assert predicted_interval(60, 11134.61, recall) == pytest.approx(interval, abs=1e-3)


def test_a_notice_leads_to_the_farthest_save_that_fits():
    assert final_save(120, peer_save_p95_s=5, remote_save_p95_s=60).target == "remote"
    assert final_save(30, peer_save_p95_s=5, remote_save_p95_s=60).target == "peer"
    assert final_save(30, peer_save_p95_s=25).target == "none"


def test_only_unnoticed_failures_call_for_saves():
    assert unnoticed_mtbf_s(3600, 0.75) == 14400
    with pytest.raises(PolicyError):
        unnoticed_mtbf_s(3600, 1.0)


def test_a_prediction_is_acted_on_only_if_there_is_enough_to_lose_and_time_to_save_it():
    assert should_act_on_prediction(100, 20, proactive_cost_s=10, precision=0.5)
    assert not should_act_on_prediction(15, 20, proactive_cost_s=10, precision=0.5)
    assert not should_act_on_prediction(100, 5, proactive_cost_s=10, precision=0.5)
