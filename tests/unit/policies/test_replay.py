"""Replaying real gaps and whole records."""

from __future__ import annotations

import pytest

from policies.online import OnlinePlan
from policies.reliability import GammaRate
from policies.replay import FixedDriver, OnlineDriver, best_static, play, replay_efficiency, replay_optimum


def test_saves_that_fit_into_each_life_are_counted():
    # 1000 - 100 leaves 900: four periods of 210; 300 - 100 leaves none; downtime is paid once a life.
    value = replay_efficiency(200, [1000, 300], cost_s=10, restart_s=100, downtime_s=50)
    assert value == pytest.approx(200 * 4 / (1300 + 100))


def test_a_life_that_has_not_ended_counts_with_its_saves():
    assert replay_efficiency(100, [250], cost_s=0.0, censored_s=250) == pytest.approx(400 / 500)


def test_equal_gaps_are_best_filled_by_a_whole_number_of_saves():
    interval, value = replay_optimum([1000.0] * 50, cost_s=10)
    saves = 1000 // (interval + 10)
    assert value == pytest.approx(interval * saves / 1000)
    assert value > replay_efficiency(138, [1000.0] * 50, cost_s=10)


def test_a_record_is_played_second_by_second():
    # Saves end at 110, 220; a failure at 300 undoes 80; restart until 350 is hit at 340 and starts anew until 390;
    # saves end at 500, 610; the record ends at 700 with 90 unsaved.
    played = play([300, 340], 700, FixedDriver(100), cost_s=10, restart_s=50)
    assert (played.saves, played.failures) == (4, 2)
    assert played.efficiency == pytest.approx(400 / 700)


def test_without_failures_only_saves_cost():
    assert play([], 1100, FixedDriver(100), cost_s=10).efficiency == pytest.approx(1000 / 1100)


def test_the_best_static_interval_is_the_best_of_those_that_are_tried():
    times = [float(t) for t in range(900, 90_000, 900)]
    interval, value = best_static(times, 90_000, cost_s=10, restart_s=20)
    assert value == play(times, 90_000, FixedDriver(interval), cost_s=10, restart_s=20).efficiency
    assert value >= play(times, 90_000, FixedDriver(interval * 1.05), cost_s=10, restart_s=20).efficiency


def test_the_online_loop_learns_from_a_record_and_keeps_its_reasons():
    times = [600.0 * index for index in range(1, 400)]
    driver = OnlineDriver(OnlinePlan(prior=GammaRate.prior(1 / 36_000), first_stall_s=5), 1)
    played = play(times, 600.0 * 400, driver, cost_s=5, restart_s=10)
    assert driver.state.mtbf_s == pytest.approx(600, rel=0.1)
    assert 3 < len(driver.decisions) < 30
    assert all(decision.changed and decision.reason for _, decision in driver.decisions)
    assert played.efficiency > play(times, 600.0 * 400, FixedDriver(600.0), cost_s=5, restart_s=10).efficiency
