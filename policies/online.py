"""Keep the interval right while the run lives: measurements in, a decision with its reason out.

``step(state, observation) -> (state, decision)`` is pure; time arrives in the observations (seconds of the run's own
clock, never falling). The caller journals every decision that ``changed`` something and passes what it measures:

    Saved -> Written -> (Slowed)        the cost of a save, seen from training
    Failed -> Restored                  the failure rate, by class, and what a restore takes
    Running, Resized                    exposure in node-seconds, and the number of nodes

What is learnt: the visible cost as a mean of the last 20 saves, write times as mean and p95, restore times by class,
the failure rate as a Gamma posterior that forgets with a half-life of about 30 failures, and that starts from a weak
prior.

It recomputes on a failure, a resize, a visible cost that drifted by a fifth, and every ten minutes. It adopts what is
more than a fifth away from what is in force (which costs at most 1.7 % of the overhead), not before three saves have
passed; a constraint that broke and a resize are adopted at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from policies.constraints import Box, Limits, single_tier_box
from policies.diagnostics import burst_share
from policies.domain import PolicyError, check_nonnegative, check_positive
from policies.interval import choose, whole_steps
from policies.measurements import Failed, Observation, Resized, Restored, Running, Saved, Slowed, Written
from policies.reliability import DEFAULT_PRIOR, DEFAULT_SHARES, ClassShares, GammaRate, half_life_s
from policies.two_tier import FailureModel, Tier, TwoTier, TwoTierBox, optimum

__all__ = [
    "Decision",
    "Failed",
    "Observation",
    "OnlineInterval",
    "OnlinePlan",
    "Resized",
    "Restored",
    "Running",
    "Saved",
    "Slowed",
    "Written",
    "begin",
    "step",
]

_KEPT_SAMPLES = 20
_KEPT_FAILURES = 50
_RATE_CLASSES = ("process", "node", "domain")
# Below half a failure the memory of a long quiet time would call for no saves at all.
_LEAST_ALPHA = 0.5


@dataclass(frozen=True, slots=True)
class OnlinePlan:
    """What the user wants, and what is assumed until it has been measured. Seconds.

    ``policy`` as in ``interval.choose``; with ``two_tier`` and the policy ``"auto"`` the remote period is chosen as
    well, every ``remote_every``-th save otherwise. ``rpo_node_s`` bounds what a process or node may cost,
    ``rpo_domain_s`` what a correlated loss may. ``first_*`` are guesses that the first measurement replaces.
    """

    policy: str | float = "auto"
    two_tier: bool = False
    remote_every: int = 1
    prior: GammaRate = DEFAULT_PRIOR
    shares: ClassShares = DEFAULT_SHARES
    rpo_node_s: float | None = None
    rpo_domain_s: float | None = None
    budget: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    first_stall_s: float = 1.0
    first_restart_s: float = 30.0
    deadband: float = 1.2
    recompute_every_s: float = 600.0
    events_between_changes: int = 3


@dataclass(frozen=True, slots=True)
class Decision:
    """What is in force now. ``changed`` if this observation changed it; ``reason`` says why it did or did not.

    ``steps`` where the step time is known. ``save_early``: failures come in bursts here, so that the first save after a
    restore is worth taking before its time. ``numbers`` is what the reason rests on, for the journal.
    """

    interval_s: float
    k: int
    steps: int | None
    changed: bool
    reason: str
    save_early: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OnlineInterval:
    """Everything the loop knows; a run that keeps it, or replays its observations, decides the same again."""

    plan: OnlinePlan
    nodes: int
    interval_s: float
    k: int
    rate: GammaRate
    shares: ClassShares
    t: float
    stalls: tuple[float, ...] = ()
    remote_stalls: tuple[float, ...] = ()
    writes: tuple[tuple[str, float], ...] = ()
    slowdowns: tuple[tuple[str, float], ...] = ()
    restores: tuple[tuple[str, float], ...] = ()
    failure_times: tuple[float, ...] = ()
    step_time_s: float | None = None
    computed_t: float = 0.0
    computed_cost_s: float = 0.0
    events_since_change: int = 0
    changes: int = 0

    @property
    def mtbf_s(self) -> float:
        """The job's MTBF at its present size, by the posterior mean rate."""
        return self.rate.mtbf_s(self.nodes)

    def tier(self, name: str) -> Tier:
        """The tier as measured: mean stall (of the remote one: what it adds), mean write, mean slowdown."""
        stall = _mean(self.stalls, self.plan.first_stall_s)
        if name == "remote":
            stall = max(0.0, _mean(self.remote_stalls, stall) - stall)
        return Tier(stall, _mean(_of(self.writes, name), 0.0), _mean(_of(self.slowdowns, name), 0.0))

    def write_p95_s(self, name: str) -> float:
        """The 95th percentile of the last writes to this tier, 0 before the first."""
        values = sorted(_of(self.writes, name))
        return values[min(len(values) - 1, math.ceil(0.95 * len(values)) - 1)] if values else 0.0

    def restart_s(self, failure_class: str) -> float:
        """The mean restore time of this class; of all classes, or a guess, where it has not been seen."""
        everything = tuple(seconds for _, seconds in self.restores)
        return _mean(_of(self.restores, failure_class), _mean(everything, self.plan.first_restart_s))

    @property
    def burst_window_s(self) -> float:
        """Failures closer than this belong to one episode: twice the restart, and at least a minute."""
        return max(60.0, 2 * self.restart_s("node"))

    @property
    def bursty(self) -> bool:
        """Whether short gaps between failures are twice as frequent as chance would have them."""
        if len(self.failure_times) < 10:
            return False
        window = self.burst_window_s
        return burst_share(self.failure_times, window) > 2 * -math.expm1(-window / self.mtbf_s)


def begin(plan: OnlinePlan, *, nodes: int, t: float = 0.0) -> tuple[OnlineInterval, Decision]:
    """The state of a run that starts on ``nodes`` nodes at ``t``, and its first interval, from the prior."""
    check_positive("nodes", nodes)
    state = OnlineInterval(
        plan=plan, nodes=nodes, interval_s=0.0, k=1, rate=plan.prior, shares=plan.shares, t=t, computed_t=t
    )
    return _decide(state, "the run starts, nothing is measured yet", at_once=True)


def step(state: OnlineInterval, observation: Observation) -> tuple[OnlineInterval, Decision]:
    """Learn from one observation; recompute and adopt where that is due. Raises ``PolicyError`` if time falls."""
    if observation.t < state.t:
        raise PolicyError(
            "E_TIME", f"an observation at {observation.t:g} s came after one at {state.t:g} s; keep the order"
        )
    state = replace(state, t=observation.t)
    due, at_once = "", False
    if isinstance(observation, Saved):
        state = _learn_save(state, observation)
        due = _drift(state)
    elif isinstance(observation, Written):
        state = replace(state, writes=_push(state.writes, observation.tier, observation.seconds, "write"))
        due = _outrun(state) or _drift(state)
    elif isinstance(observation, Slowed):
        state = replace(
            state,
            slowdowns=_push(state.slowdowns, observation.tier, min(max(observation.share, 0.0), 0.99), "slowdown"),
        )
        due = _drift(state)
    elif isinstance(observation, Restored):
        state = replace(
            state, restores=_push(state.restores, observation.failure_class, observation.seconds, "restore")
        )
    elif isinstance(observation, Failed):
        state, due = _learn_failure(state, observation)
    elif isinstance(observation, Running):
        state = _learn_exposure(state, observation)
    else:
        was = state.nodes
        state = replace(state, nodes=int(check_positive("nodes", observation.nodes)))
        due, at_once = (f"resized from {was} to {state.nodes} nodes", True) if was != state.nodes else ("", False)
    if not due and state.t - state.computed_t >= state.plan.recompute_every_s:
        due = "ten minutes passed" if state.plan.recompute_every_s == 600 else "time passed"
    if not due:
        return state, _in_force(state, "nothing to recompute")
    return _decide(state, due, at_once=at_once)


def _learn_save(state: OnlineInterval, saved: Saved) -> OnlineInterval:
    stall = check_nonnegative("stall_s", saved.stall_s)
    state = replace(state, events_since_change=state.events_since_change + 1)
    if saved.remote and state.plan.two_tier:
        return replace(state, remote_stalls=(*state.remote_stalls, stall)[-_KEPT_SAMPLES:])
    return replace(state, stalls=(*state.stalls, stall)[-_KEPT_SAMPLES:])


def _learn_failure(state: OnlineInterval, failed: Failed) -> tuple[OnlineInterval, str]:
    if failed.failure_class not in _RATE_CLASSES:
        return state, ""
    same_episode = bool(state.failure_times) and failed.t - state.failure_times[-1] < state.burst_window_s
    state = replace(state, failure_times=(*state.failure_times, failed.t)[-_KEPT_FAILURES:])
    if same_episode:
        return state, ""
    state = replace(
        state,
        rate=state.rate.observe(1, 0.0),
        shares=state.shares.observe_counts({failed.failure_class: 1.0}),
        # Failures count beside saves: an interval longer than the time between failures never sees a save.
        events_since_change=state.events_since_change + 1,
    )
    return state, f"a failure of class {failed.failure_class}"


def _learn_exposure(state: OnlineInterval, running: Running) -> OnlineInterval:
    exposure = check_nonnegative("node_s", running.node_s)
    half_life = half_life_s(state.mtbf_s)
    rate = state.rate.decayed(2.0 ** (-exposure / state.nodes / half_life)).observe(0, exposure)
    if rate.alpha < _LEAST_ALPHA:
        rate = GammaRate(_LEAST_ALPHA, rate.beta_node_s)
    step_time = state.step_time_s
    if running.step_time_s is not None:
        step_time = check_positive("step_time_s", running.step_time_s)
    return replace(state, rate=rate, step_time_s=step_time)


def _drift(state: OnlineInterval) -> str:
    now, then = state.tier("node").visible_s, state.computed_cost_s
    if abs(now - then) > 0.2 * max(then, 1e-9):
        return f"the visible cost drifted from {then:.3g} s to {now:.3g} s"
    return ""


def _decide(state: OnlineInterval, why: str, *, at_once: bool) -> tuple[OnlineInterval, Decision]:
    wanted, k, box, binding = _wanted(state)
    # What is in force was chosen with a margin on the write's p95; it breaks when even the bare p95 does not fit.
    broken = state.interval_s < box.low / 1.1 or state.interval_s > box.high * (1 + 1e-9) or bool(_outrun(state))
    moved = state.interval_s <= 0 or max(
        abs(math.log(wanted / state.interval_s)), abs(math.log(k * wanted / (state.k * state.interval_s)))
    )
    limit = 1e-3 if at_once or broken else math.log(state.plan.deadband)
    computed = replace(state, computed_t=state.t, computed_cost_s=state.tier("node").visible_s)
    if state.interval_s > 0 and moved <= limit:
        return computed, _in_force(state, f"{why}; {wanted:.4g} s is within the deadband of {state.interval_s:.4g} s")
    if not at_once and not broken and state.events_since_change < state.plan.events_between_changes:
        # Not marked as computed: what made it due still does, at the next observation.
        return state, _in_force(state, f"{why}; only {state.events_since_change} saves and failures since the last")
    before = f"from {state.interval_s:.4g} s" if state.interval_s > 0 else "first interval"
    periods = f", every {k}th to the remote tier" if state.plan.two_tier and k > 1 else ""
    held = f", held by {binding}" if binding else ""
    changes = state.changes + (1 if state.interval_s > 0 else 0)
    state = replace(computed, interval_s=wanted, k=k, events_since_change=0, changes=changes)
    reason = (
        f"{why}: {before} to {wanted:.4g} s of work between saves{periods} for a visible cost of "
        f"{state.computed_cost_s:.3g} s and an MTBF of {state.mtbf_s:.4g} s on {state.nodes} nodes{held}"
    )
    return state, replace(_in_force(state, reason), changed=True)


def _outrun(state: OnlineInterval) -> str:
    """Which write, if any, no longer ends before the next one of its tier is due."""
    write, upload = state.write_p95_s("node"), state.write_p95_s("remote")
    local = state.tier("node")
    if state.interval_s < (1 - local.slowdown) * write:
        return f"a write takes {write:.4g} s at p95, longer than the interval"
    if state.plan.two_tier and state.k * (state.interval_s + local.visible_s) < upload:
        return f"an upload takes {upload:.4g} s at p95, longer than the remote period"
    return ""


def _wanted(state: OnlineInterval) -> tuple[float, int, Box, str | None]:
    """(interval, k, the box it had to stay in, what was binding) for what is known now."""
    plan = state.plan
    local, remote = state.tier("node"), state.tier("remote")
    limits = Limits(
        write_p95_s=state.write_p95_s("node") or None,
        rpo_s=plan.rpo_node_s,
        budget=plan.budget,
        min_s=plan.min_s,
        max_s=plan.max_s,
    )
    box = single_tier_box(local.stall_s, local.write_s, local.slowdown, limits)
    shares = state.shares.mean
    rates = [share / state.mtbf_s for share in shares]
    if not plan.two_tier or plan.policy not in ("auto", "exact", "two-tier"):
        choice = choose(
            "exact" if plan.policy == "two-tier" else plan.policy,
            cost_s=local.stall_s,
            latency_s=local.write_s,
            slowdown=local.slowdown,
            mtbf_s=state.mtbf_s,
            restart_s=state.restart_s("node"),
        )
        interval, binding = box.clamp(choice.interval_s)
        return interval, plan.remote_every, box, binding or choice.binding
    system = TwoTier(
        local,
        remote,
        FailureModel(*rates, *(state.restart_s(name) for name in _RATE_CLASSES)),
    )
    slow_upload = 1.1 * state.write_p95_s("remote")
    wall = Box().at_least(slow_upload, "in_flight_remote")
    if plan.rpo_domain_s is not None:
        wall = wall.at_most(plan.rpo_domain_s - remote.visible_s - slow_upload / 1.1, "rpo_domain")
    best = optimum(system, TwoTierBox(local=box, remote_wall=wall, budget=plan.budget))
    return best.interval_s, best.k, box, best.binding


def _in_force(state: OnlineInterval, reason: str) -> Decision:
    steps = None
    if state.step_time_s is not None:
        ideal = state.interval_s
        steps = whole_steps(ideal, state.step_time_s, 0.0, None, lambda work: -abs(math.log(work / ideal)))
    return Decision(
        interval_s=state.interval_s,
        k=state.k,
        steps=steps,
        changed=False,
        reason=reason,
        save_early=state.bursty,
        numbers={
            "interval_s": state.interval_s,
            "k": state.k,
            "visible_cost_s": state.tier("node").visible_s,
            "mtbf_s": state.mtbf_s,
            "nodes": state.nodes,
            "failures_in_memory": state.rate.alpha,
            "write_p95_s": state.write_p95_s("node"),
            "changes": state.changes,
        },
    )


def _mean(values: tuple[float, ...], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _of(samples: tuple[tuple[str, float], ...], name: str) -> tuple[float, ...]:
    return tuple(value for key, value in samples if key == name)


def _push(samples: tuple[tuple[str, float], ...], name: str, value: float, what: str) -> tuple[tuple[str, float], ...]:
    """The samples with one more, the oldest of the same name dropped where there are too many."""
    check_nonnegative(what, value)
    samples = (*samples, (name, value))
    if sum(key == name for key, _ in samples) > _KEPT_SAMPLES:
        oldest = next(index for index, (key, _) in enumerate(samples) if key == name)
        samples = samples[:oldest] + samples[oldest + 1 :]
    return samples
