"""The online loop: what it learns, when it decides, and what it says."""

from __future__ import annotations

import pytest

from policies.domain import PolicyError
from policies.interval import exact
from policies.online import (
    Decision,
    Failed,
    OnlineInterval,
    OnlinePlan,
    Resized,
    Restored,
    Running,
    Saved,
    Slowed,
    Written,
    begin,
    step,
)
from policies.reliability import GammaRate

PRIOR = GammaRate.prior(1 / (64 * 3 * 3600))  # 64 nodes, a failure every three hours
PLAN = OnlinePlan(prior=PRIOR, first_stall_s=10)


def after(state: OnlineInterval, *observations) -> tuple[OnlineInterval, Decision]:
    decision = None
    for observation in observations:
        state, decision = step(state, observation)
    assert decision is not None
    return state, decision


def saves(start: float, count: int, stall_s: float, every: float = 100.0) -> list[Saved]:
    return [Saved(start + every * index, stall_s) for index in range(count)]


def test_a_run_starts_with_the_interval_of_its_prior():
    state, first = begin(PLAN, nodes=64)
    assert first.changed
    assert first.interval_s == pytest.approx(exact(10, 3 * 3600))
    assert "nothing is measured yet" in first.reason
    assert first.numbers["mtbf_s"] == pytest.approx(3 * 3600)
    assert state.changes == 0


def test_a_measured_stall_replaces_the_guess_after_three_saves():
    state, _ = begin(PLAN, nodes=64)
    state, decision = after(state, *saves(1, 2, 0.1))
    assert not decision.changed
    assert "only 2 saves and failures since the last" in decision.reason
    state, decision = step(state, Saved(300, 0.1))
    assert decision.changed
    assert decision.reason.startswith("the visible cost drifted from 10 s to 0.1 s")
    assert decision.interval_s == pytest.approx(exact(0.1, state.mtbf_s), rel=1e-6)


def test_small_drifts_stay_within_the_deadband():
    state, _ = begin(PLAN, nodes=64)
    state, _ = after(state, *saves(0, 25, 10))
    before = state.interval_s
    state, decision = after(state, *saves(3000, 25, 13))
    assert decision.interval_s == before
    assert state.changes == 0


def test_a_failure_raises_the_rate_and_is_explained():
    state, _ = begin(PLAN, nodes=64)
    state, _ = after(state, *saves(0, 5, 10))
    state, decision = step(state, Failed(1000, "node"))
    assert state.rate.alpha == pytest.approx(PRIOR.alpha + 1)
    assert decision.changed, "half the MTBF is an interval 30 % shorter"
    assert decision.reason.startswith("a failure of class node: from ")
    assert decision.interval_s == pytest.approx(exact(10, state.mtbf_s))


def test_user_errors_and_announced_stops_do_not_count():
    state, _ = begin(PLAN, nodes=64)
    state, decision = after(state, Failed(1000, "user"), Failed(2000, "noticed"))
    assert state.rate == PRIOR
    assert not decision.changed


def test_a_storm_of_restarts_counts_once():
    state, _ = begin(PLAN, nodes=64)
    state, _ = after(state, *(Failed(1000 + 30 * index, "process") for index in range(20)))
    assert state.rate.alpha == pytest.approx(PRIOR.alpha + 1)


def test_a_resize_rescales_at_once():
    state, _ = begin(PLAN, nodes=64)
    before = state.interval_s
    state, decision = step(state, Resized(50, 16))
    assert decision.changed
    assert state.mtbf_s == pytest.approx(4 * 3 * 3600)
    assert decision.interval_s == pytest.approx(exact(10, 4 * 3 * 3600))
    assert decision.interval_s > 1.9 * before
    assert "resized from 64 to 16 nodes" in decision.reason


def test_a_quiet_run_saves_less_and_less_often_but_never_stops():
    state, first = begin(PLAN, nodes=64)
    state, _ = after(state, *saves(0, 5, 10))
    for hour in range(1, 2000):
        state, _ = step(state, Running(3600.0 * hour, 64 * 3600))
        state, _ = step(state, Saved(3600.0 * hour, 10))
    assert 3 * first.interval_s < state.interval_s < 100 * first.interval_s


def test_a_write_longer_than_the_interval_breaks_it_at_once():
    state, first = begin(PLAN, nodes=64)
    state, decision = after(state, Saved(1, 10), Written(2, 5 * first.interval_s))
    assert decision.changed
    assert decision.interval_s >= 5 * first.interval_s
    assert decision.reason.startswith("a write takes")
    assert decision.reason.endswith("held by in_flight")


def test_slowdown_is_part_of_the_visible_cost():
    state, _ = begin(PLAN, nodes=64)
    state, _ = after(state, Saved(1, 10), Written(2, 100), Slowed(3, 0.2))
    assert state.tier("node").visible_s == pytest.approx(30)


def test_restore_times_are_kept_by_class():
    state, _ = begin(PLAN, nodes=64)
    assert state.restart_s("domain") == PLAN.first_restart_s
    state, _ = after(state, Restored(1, 2.0, "process"), Restored(2, 6.0, "node"))
    assert (state.restart_s("process"), state.restart_s("node"), state.restart_s("domain")) == (2.0, 6.0, 4.0)


def test_time_that_runs_backwards_is_refused():
    state, _ = begin(PLAN, nodes=64)
    state, _ = step(state, Saved(100, 1))
    with pytest.raises(PolicyError) as caught:
        step(state, Saved(99, 1))
    assert caught.value.code == "E_TIME"


def test_an_rpo_bounds_the_interval_and_a_fixed_policy_is_left_alone():
    _, decision = begin(OnlinePlan(prior=PRIOR, first_stall_s=10, rpo_node_s=120), nodes=64)
    assert decision.interval_s == pytest.approx(110)
    state, decision = begin(OnlinePlan(policy=600.0, prior=PRIOR), nodes=64)
    assert decision.interval_s == 600
    state, decision = after(state, *saves(0, 30, 5), Failed(9000, "node"))
    assert (decision.interval_s, state.changes) == (600, 0)


def test_two_tiers_choose_their_remote_period_too():
    plan = OnlinePlan(prior=PRIOR, two_tier=True, first_stall_s=1)
    state, _ = begin(plan, nodes=64)
    observations = []
    for index in range(30):
        t = 100.0 * index
        observations += [
            Saved(t, 1.0 if index % 5 else 4.0, remote=index % 5 == 0),
            Written(t, 10, "node"),
            Slowed(t, 0.02, "node"),
            Written(t, 200, "remote"),
            Slowed(t, 0.02, "remote"),
            Running(t, 6400),
        ]
    state, decision = after(state, *observations)
    assert state.tier("remote").stall_s == pytest.approx(3.0)
    assert state.k > 1
    assert state.k * state.interval_s >= 200
    assert "th to the remote tier" in begin_reason(state) or decision.k == state.k


def begin_reason(state: OnlineInterval) -> str:
    return step(state, Resized(state.t, state.nodes + 64))[1].reason


def test_steps_are_given_once_the_step_time_is_known():
    state, first = begin(PLAN, nodes=64)
    assert first.steps is None
    state, decision = step(state, Running(10, 640, step_time_s=2.0))
    assert decision.steps == pytest.approx(state.interval_s / 2, abs=1)


def test_bursts_of_failures_call_for_an_early_first_save():
    state, decision = begin(PLAN, nodes=64)
    times = [10_000.0 * burst + 70 * index for burst in range(6) for index in range(3)]
    state, decision = after(state, Restored(0, 34.0, "node"), *(Failed(10 + t, "node") for t in times))
    # Gaps of 70 s are outside one episode (68 s) and inside none by chance; lengthen the restart and they are one.
    state, decision = step(state, Restored(times[-1] + 20, 150.0, "node"))
    assert decision.save_early


def test_the_same_observations_decide_the_same():
    observations = [*saves(0, 10, 0.5), Failed(2000, "node"), Restored(2100, 30, "node"), Running(3000, 64 * 900)]
    one, two = begin(PLAN, nodes=64)[0], begin(PLAN, nodes=64)[0]
    assert after(one, *observations) == after(two, *observations)


def test_impossible_measurements_are_refused():
    state, _ = begin(PLAN, nodes=64)
    for bad in (Saved(1, -1), Written(1, float("nan")), Running(1, -5), Resized(1, 0), Restored(1, -2)):
        with pytest.raises(PolicyError):
            step(state, bad)
