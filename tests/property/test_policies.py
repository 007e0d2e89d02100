"""What must hold of every interval, whatever the numbers."""

from __future__ import annotations

import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policies.constraints import Limits, single_tier_box
from policies.diagnostics import decluster, weibull_fit
from policies.domain import PolicyError
from policies.failure_log import FailureLog, read_failure_log
from policies.interval import choose
from policies.online import (
    Failed,
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
from policies.reliability import GammaRate, rate_interval
from policies.renewal import renewal_efficiency
from policies.replay import replay_efficiency
from policies.single_tier import daly, efficiency, exact, finite_job, lost_time, young
from policies.two_tier import FailureModel, Tier, TwoTier, optimum

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)
FEW = settings(derandomize=True, deadline=None, max_examples=60)

mtbfs = st.floats(1e2, 1e8)
ratios = st.floats(1e-9, 1.9)
seconds = st.floats(0, 1e5)


@SETTINGS
@given(mtbf=mtbfs, ratio=ratios, restart=st.floats(0, 2))
def test_the_best_efficiency_is_one_minus_x_less_the_restarts(mtbf, ratio, restart):
    interval = exact(ratio * mtbf, mtbf)
    value = efficiency(interval, cost_s=ratio * mtbf, mtbf_s=mtbf, restart_s=restart * mtbf)
    assert math.isclose(value, (1 - interval / mtbf) * math.exp(-restart), rel_tol=1e-8, abs_tol=1e-12)


@SETTINGS
@given(mtbf=mtbfs, ratio=ratios, restart=st.floats(0, 2), factor=st.floats(0.01, 100))
def test_no_other_interval_is_better(mtbf, ratio, restart, factor):
    cost = ratio * mtbf
    best = exact(cost, mtbf)
    job = {"cost_s": cost, "mtbf_s": mtbf, "restart_s": restart * mtbf}
    assert efficiency(best * factor, **job) <= efficiency(best, **job) * (1 + 1e-12)


@SETTINGS
@given(mtbf=mtbfs, ratio=st.floats(1e-9, 100), more=st.floats(1.001, 100))
def test_the_interval_grows_with_the_cost_and_with_the_mtbf(mtbf, ratio, more):
    cost = ratio * mtbf
    assert exact(cost, mtbf) <= exact(cost * more, mtbf) <= mtbf * (1 + 1e-12)
    assert exact(cost, mtbf) < exact(cost, mtbf * more)


@SETTINGS
@given(mtbf=mtbfs, ratio=st.floats(1e-9, 100), unit=st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(mtbf, ratio, unit):
    cost = ratio * mtbf
    assert math.isclose(exact(cost * unit, mtbf * unit), unit * exact(cost, mtbf), rel_tol=1e-9)


@SETTINGS
@given(mtbf=mtbfs, ratio=st.floats(1e-9, 1.99))
def test_daly_is_close_from_below_and_young_is_too_long(mtbf, ratio):
    best = exact(ratio * mtbf, mtbf)
    assert best * (1 - 0.062) <= daly(ratio * mtbf, mtbf) <= best * (1 + 1e-9)
    assert young(ratio * mtbf, mtbf) >= best


@SETTINGS
@given(
    interval=st.floats(1, 1e5),
    cost=st.floats(0.01, 1e4),
    mtbf=st.floats(1e3, 1e7),
    restart=seconds,
    latency=seconds,
    downtime=seconds,
)
def test_lost_time_is_never_negative_and_adds_up(interval, cost, mtbf, restart, latency, downtime):
    assume((interval + cost + restart + latency) / mtbf < 50)
    lost = lost_time(interval, cost_s=cost, mtbf_s=mtbf, restart_s=restart, latency_s=latency, downtime_s=downtime)
    parts = (lost.useful, lost.save, lost.rework, lost.restart, lost.latency)
    assert min(parts) >= -1e-9
    assert math.isclose(sum(parts), 1, rel_tol=1e-9)


@SETTINGS
@given(work=st.floats(1, 1e7), cost=st.floats(0.1, 1e4), mtbf=st.floats(1e3, 1e7), other=st.integers(1, 500))
def test_no_other_number_of_segments_finishes_sooner(work, cost, mtbf, other):
    plan = finite_job(work, cost_s=cost, mtbf_s=mtbf)
    exponent = (work / other + cost) / mtbf
    assume(exponent < 600)
    assert plan.expected_s <= mtbf * other * math.expm1(exponent) * (1 + 1e-9)


@SETTINGS
@given(
    cost=st.floats(0, 1e4),
    mtbf=mtbfs,
    restart=seconds,
    latency=seconds,
    slowdown=st.floats(0, 0.9),
    floor=seconds,
    least=st.none() | st.floats(0, 1e5),
    most=st.none() | st.floats(1, 1e6),
    step_time=st.none() | st.floats(0.01, 100),
    policy=st.sampled_from(["auto", "young", "daly", "continuous", "budget:0.03", 600.0]),
)
def test_a_choice_keeps_its_constraints_and_always_has_a_reason(
    cost, mtbf, restart, latency, slowdown, floor, least, most, step_time, policy
):
    assume(least is None or most is None or least <= most)
    choice = choose(
        policy,
        cost_s=cost,
        mtbf_s=mtbf,
        restart_s=restart,
        latency_s=latency,
        slowdown=slowdown,
        floor_s=floor,
        min_s=least,
        max_s=most,
        step_time_s=step_time,
    )
    lowest = max((1 - slowdown) * latency, floor, least or 0)
    assert choice.interval_s >= lowest
    assert choice.interval_s > 0
    assert most is None or choice.interval_s <= max(most, lowest, step_time or 0, mtbf * 1e-6)
    assert 0 <= choice.efficiency <= 1
    assert choice.reason
    assert choice.steps is None or choice.steps >= 1
    if choice.binding is None and choice.wanted_s > 0:
        assert choice.interval_s == choice.wanted_s


@SETTINGS
@given(
    stall=st.floats(0, 100),
    write=st.floats(0, 1000),
    slowdown=st.floats(0, 0.9),
    rpo=st.floats(1, 1e4),
)
def test_an_rpo_that_is_accepted_is_kept_by_every_interval_of_the_box(stall, write, slowdown, rpo):
    box = single_tier_box(stall, write, slowdown, Limits(rpo_s=rpo))
    if any(finding.code == "R_RPO" for finding in box.findings):
        # At no interval that the write allows would the promise hold.
        assert box.low + stall + slowdown * write + write >= rpo - 1e-6
    else:
        assert box.low <= box.high
        assert box.high + stall + slowdown * write + write <= rpo * (1 + 1e-9)


systems = st.builds(
    lambda mtbf, shares, stalls, writes, slowdowns, restarts: TwoTier(
        Tier(stalls[0] * mtbf, writes[0] * mtbf, slowdowns[0]),
        Tier(stalls[1] * mtbf, writes[1] * mtbf, slowdowns[1]),
        FailureModel(*(share / sum(shares) / mtbf for share in shares), *(restart * mtbf for restart in restarts)),
    ),
    st.floats(1e3, 1e6),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0.01, 1)),
    st.tuples(st.floats(1e-5, 0.01), st.floats(1e-4, 0.05)),
    st.tuples(st.floats(0, 0.01), st.floats(0, 0.05)),
    st.tuples(st.floats(0, 0.3), st.floats(0, 0.3)),
    st.tuples(st.floats(0, 0.1), st.floats(0, 0.1), st.floats(0, 0.3)),
)


@FEW
@given(system=systems, factor=st.floats(0.3, 3), shift=st.integers(-3, 3))
def test_no_other_interval_and_k_are_better(system, factor, shift):
    best = optimum(system)
    other = system.efficiency(best.interval_s * factor, max(1, best.k + shift))
    assert other <= best.efficiency * (1 + 1e-9)


@FEW
@given(system=systems, interval=st.floats(1e-3, 0.5), k=st.integers(1, 30))
def test_two_tier_lost_time_adds_up(system, interval, k):
    mtbf = 1 / system.failures.total_per_s
    lost = system.lost_time(interval * mtbf, k)
    parts = (lost.useful, lost.save, lost.rework, lost.restart, lost.latency)
    assert math.isclose(sum(parts), 1, rel_tol=1e-9)
    assert min(parts) > -1e-9


@FEW
@given(system=systems, unit=st.floats(1e-2, 1e2))
def test_two_tiers_do_not_mind_the_unit_of_time(system, unit):
    model = system.failures
    scaled = TwoTier(
        Tier(system.local.stall_s * unit, system.local.write_s * unit, system.local.slowdown),
        Tier(system.remote.stall_s * unit, system.remote.write_s * unit, system.remote.slowdown),
        FailureModel(
            model.process_per_s / unit,
            model.node_per_s / unit,
            model.domain_per_s / unit,
            model.restart_process_s * unit,
            model.restart_node_s * unit,
            model.restart_domain_s * unit,
        ),
    )
    mtbf = 1 / model.total_per_s
    assert math.isclose(system.efficiency(mtbf / 20, 4), scaled.efficiency(unit * mtbf / 20, 4), rel_tol=1e-9)


@SETTINGS
@given(interval=st.floats(1, 1e4), cost=st.floats(0.1, 1e3), mtbf=st.floats(1e3, 1e6), restart=st.floats(0, 1e3))
def test_the_renewal_formula_with_exponential_lives_is_the_closed_form(interval, cost, mtbf, restart):
    found = renewal_efficiency(
        interval,
        survival=lambda t: math.exp(-t / mtbf),
        mean_s=mtbf,
        cost_s=cost,
        restart_s=restart,
    )
    assert math.isclose(
        found, efficiency(interval, cost_s=cost, mtbf_s=mtbf, restart_s=restart), rel_tol=1e-6, abs_tol=1e-12
    )


@SETTINGS
@given(
    gaps=st.lists(st.floats(1, 1e5), min_size=1, max_size=30),
    interval=st.floats(1, 1e4),
    cost=st.floats(0, 1e3),
    restart=st.floats(0, 1e3),
)
def test_a_replay_is_an_efficiency(gaps, interval, cost, restart):
    assert 0 <= replay_efficiency(interval, gaps, cost_s=cost, restart_s=restart) <= 1


@SETTINGS
@given(times=st.lists(st.floats(0, 1e6), max_size=50).map(sorted), window=st.floats(0.1, 1e4))
def test_episodes_begin_apart_and_with_a_failure(times, window):
    kept = decluster(times, window)
    assert set(kept) <= set(times)
    assert all(later - earlier >= window for earlier, later in zip(kept, kept[1:], strict=False))
    assert bool(kept) == bool(times)


@SETTINGS
@given(count=st.integers(0, 1000), exposure=st.floats(1e-3, 1e9), level=st.floats(0.5, 0.999))
def test_an_exact_interval_holds_the_estimate(count, exposure, level):
    found = rate_interval(count, exposure, level)
    assert found.low <= found.rate <= found.high
    assert found.high > 0


@SETTINGS
@given(alpha=st.floats(0.5, 1e4), beta=st.floats(1, 1e12), failures=st.integers(0, 100), exposure=st.floats(0, 1e10))
def test_a_belief_moves_towards_what_was_seen(alpha, beta, failures, exposure):
    before = GammaRate(alpha, beta)
    after = before.observe(failures, exposure)
    if exposure > 0:
        seen = failures / exposure
        low, high = sorted((before.rate_per_node_s, seen))
        assert low * (1 - 1e-9) <= after.rate_per_node_s <= high * (1 + 1e-9)
    low, high = after.interval()
    assert low <= after.rate_per_node_s * (1 + 1e-9)
    assert high > low


@FEW
@given(shape=st.floats(0.5, 3), scale=st.floats(1, 1e5), count=st.integers(30, 200))
def test_a_weibull_fit_finds_the_law_that_made_the_quantiles(shape, scale, count):
    lives = [scale * (-math.log(1 - (index + 0.5) / count)) ** (1 / shape) for index in range(count)]
    fit = weibull_fit(lives)
    assert math.isclose(fit.shape, shape, rel_tol=0.08)
    assert math.isclose(fit.scale, scale, rel_tol=0.03)


observations = st.lists(
    st.one_of(
        st.builds(Saved, st.just(0.0), st.floats(0, 100), st.booleans()),
        st.builds(Written, st.just(0.0), st.floats(0, 1e4), st.sampled_from(["node", "remote"])),
        st.builds(Slowed, st.just(0.0), st.floats(-0.5, 1.5), st.sampled_from(["node", "remote"])),
        st.builds(Failed, st.just(0.0), st.sampled_from(["process", "node", "domain", "user", "noticed"])),
        st.builds(Restored, st.just(0.0), st.floats(0, 1e4), st.sampled_from(["process", "node", "domain"])),
        st.builds(Running, st.just(0.0), st.floats(0, 1e6), st.none() | st.floats(0.01, 100)),
        st.builds(Resized, st.just(0.0), st.integers(1, 4096)),
    ),
    max_size=60,
)


@FEW
@given(events=observations, gaps=st.lists(st.floats(0, 3000), min_size=60, max_size=60), two=st.booleans())
def test_the_online_loop_survives_anything_and_explains_itself(events, gaps, two):
    state, decision = begin(OnlinePlan(two_tier=two), nodes=8)
    now = 0.0
    for event, gap in zip(events, gaps, strict=False):
        now += gap
        before = state
        state, decision = step(state, type(event)(now, *(getattr(event, f) for f in event.__slots__ if f != "t")))
        assert decision.reason
        assert math.isfinite(decision.interval_s)
        assert decision.interval_s > 0
        assert decision.k >= 1
        assert decision.changed == (state.changes > before.changes)
        assert decision.changed or (state.interval_s, state.k) == (before.interval_s, before.k)


@SETTINGS
@given(text=st.text(alphabet="time,nodeclas\n0123456789.-:TZ\"' ", max_size=200))
def test_any_text_is_a_log_or_an_error_with_a_code(text):
    outcome: FailureLog | PolicyError
    try:
        outcome = read_failure_log(("time,node,class\n" + text).splitlines(), "log.csv")
    except PolicyError as problem:
        outcome = problem
    if isinstance(outcome, PolicyError):
        assert outcome.code.startswith("E_LOG")
        assert "log.csv" in outcome.message
    else:
        assert outcome.duration_s > 0
        assert outcome.times_s() == sorted(outcome.times_s())
