"""Everything that ``elastic tune`` can say about one problem, as one record with a versioned JSON form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastic.cli.tune_facts import Rate
from elastic.cli.tune_problem import Problem, Solution
from elastic.cli.tune_units import duration_text
from policies.domain import Finding
from policies.fleet import FleetRate, ScalePoint, goodput_at_scale
from policies.interval import whole_steps
from policies.preemption import FinalSave
from policies.single_tier import FiniteJob, LostTime, daly, exact, finite_job, young

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "Answer",
    "ReplayResult",
    "Rival",
    "Sensitivity",
    "Validation",
    "answer",
    "curve",
    "ordinal",
    "scale",
    "with_findings",
]

SCHEMA = "ray-elastic/tune"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Rival:
    """Another interval beside the answer, and what it would be worth on the same job."""

    name: str
    interval_s: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What changes if one number is off by ``factor``. ``overhead`` is the overhead over that of the answer."""

    what: str
    factor: float
    efficiency: float
    overhead: float


@dataclass(frozen=True, slots=True)
class Validation:
    """The answer played by the simulator: ``z`` beyond 4 means that the model and the simulation disagree."""

    efficiency: float
    standard_error: float
    failures: int
    z: float
    seed: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The answer run through the user's own failures, beside the best fixed interval in hindsight and the model."""

    log: str
    failures: int
    efficiency: float
    model: float
    hindsight_interval_s: float
    hindsight_efficiency: float
    online_efficiency: float | None
    online_changes: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The recommendation with its reasons. Times in seconds, efficiencies as shares of wall time."""

    policy: str
    interval_s: float
    period_s: float
    steps: int | None
    k: int
    remote_period_s: float | None
    efficiency: float
    lost_time: LostTime
    rate: Rate
    interval_low_s: float | None
    interval_high_s: float | None
    problem: Problem
    wanted_s: float
    binding: str | None
    rivals: tuple[Rival, ...]
    sensitivity: tuple[Sensitivity, ...]
    findings: tuple[Finding, ...]
    schedule_s: tuple[float, ...] = ()
    finite: FiniteJob | None = None
    final_save: FinalSave | None = None
    scale: tuple[ScalePoint, ...] = ()
    validation: Validation | None = None
    replay: ReplayResult | None = None

    @property
    def reason(self) -> str:
        """One sentence: what to do and why."""
        every = f" and every {ordinal(self.k)} of them to the remote tier" if self.problem.remote is not None else ""
        moved = f" ({self.binding} moved it from {duration_text(self.wanted_s)})" if self.binding else ""
        return (
            f"save after every {duration_text(self.interval_s)} of work{every}{moved}: one save costs "
            f"{duration_text(self.problem.visible_s)} of training, a failure comes every "
            f"{duration_text(self.rate.mtbf_s)}, and {self.efficiency:.2%} of the time is useful"
        )

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data; infinities become null. ``version`` changes when a key changes its meaning."""
        local, remote = self.problem.local, self.problem.remote
        plain: dict[str, Any] = _plain(
            {
                "schema": SCHEMA,
                "version": SCHEMA_VERSION,
                "policy": self.policy,
                "reason": self.reason,
                "interval_s": self.interval_s,
                "period_s": self.period_s,
                "steps": self.steps,
                "k": self.k,
                "remote_period_s": self.remote_period_s,
                "efficiency": self.efficiency,
                "lost_time": asdict(self.lost_time),
                "binding": self.binding,
                "wanted_s": self.wanted_s,
                "interval_confidence_s": [self.interval_low_s, self.interval_high_s],
                "young_s": self.rivals[0].interval_s,
                "daly_s": self.rivals[1].interval_s,
                "rivals": [asdict(rival) for rival in self.rivals],
                "sensitivity": [asdict(entry) for entry in self.sensitivity],
                "mtbf": {
                    "mtbf_s": self.rate.mtbf_s,
                    "low_s": self.rate.low_s,
                    "high_s": self.rate.high_s,
                    "level": 0.95,
                    "source": self.rate.source,
                    "failures": self.rate.failures,
                    "exposure_node_s": self.rate.exposure_node_s,
                    "prior": self.rate.prior,
                },
                "cost": {
                    "visible_s": local.visible_s,
                    "stall_s": local.stall_s,
                    "write_s": local.write_s,
                    "slowdown": local.slowdown,
                    "over_mtbf": local.visible_s / self.rate.mtbf_s,
                    "remote": None if remote is None else {**asdict(remote), "visible_s": remote.visible_s},
                },
                "restart": {
                    "process_s": self.problem.restarts_s[0],
                    "node_s": self.problem.restarts_s[1],
                    "domain_s": self.problem.restarts_s[2],
                    "downtime_s": self.problem.downtime_s,
                },
                "shares": None if remote is None else list(self.problem.shares),
                "schedule_s": list(self.schedule_s) or None,
                "finite_job": None if self.finite is None else asdict(self.finite),
                "final_save": None if self.final_save is None else asdict(self.final_save),
                "scale": [asdict(point) for point in self.scale] or None,
                "validation": None if self.validation is None else asdict(self.validation),
                "replay": None if self.replay is None else asdict(self.replay),
                "findings": [asdict(finding) for finding in self.findings],
            }
        )
        return plain


def answer(
    problem: Problem,
    rate: Rate,
    *,
    step_time_s: float | None = None,
    work_s: float | None = None,
    findings: Sequence[Finding] = (),
) -> Answer:
    """Solve ``problem`` and put beside it what a careful reader would ask next."""
    solution = problem.solve()
    found = [*findings, *rate.findings, *solution.findings]
    steps = None
    if step_time_s is not None:
        box_low = solution.interval_s if solution.binding and solution.interval_s > solution.wanted_s else 0.0
        box_high = solution.interval_s if solution.binding and solution.interval_s < solution.wanted_s else None
        steps = whole_steps(
            solution.interval_s, step_time_s, box_low, box_high, lambda work: problem.worth(work, solution.k)
        )
    remote_period = None
    if problem.remote is not None:
        remote_period = solution.k * (solution.interval_s + problem.visible_s) + problem.remote.visible_s
    finite = None
    if work_s is not None and problem.remote is None:
        finite = finite_job(
            work_s,
            cost_s=problem.visible_s,
            mtbf_s=problem.mtbf_s,
            restart_s=problem.effective_restart_s,
            downtime_s=problem.downtime_s,
        )
    if work_s is not None and work_s < solution.interval_s:
        found.append(
            Finding("W_SHORT_JOB", "warn", "the job is shorter than the best interval: one save, at its end, is enough")
        )
    found.extend(_answer_findings(solution, steps))
    low = problem.solve(rate.low_s).interval_s if rate.low_s else None
    high = problem.solve(rate.high_s).interval_s if rate.high_s and math.isfinite(rate.high_s) else None
    return Answer(
        policy=problem.policy,
        interval_s=solution.interval_s,
        period_s=solution.interval_s + problem.visible_s,
        steps=steps,
        k=solution.k,
        remote_period_s=remote_period,
        efficiency=solution.efficiency,
        lost_time=problem.lost_time(solution),
        rate=rate,
        interval_low_s=low,
        interval_high_s=high,
        problem=problem,
        wanted_s=solution.wanted_s,
        binding=solution.binding,
        rivals=_rivals(problem, solution),
        sensitivity=_sensitivity(problem, solution),
        findings=tuple(dict.fromkeys(found)),
        schedule_s=solution.schedule_s,
        finite=finite,
    )


def curve(problem: Problem, solution_s: float, k: int, points: int = 41) -> list[tuple[float, float]]:
    """(interval, efficiency) on a logarithmic grid from a tenth of the answer to ten times it."""
    factors = [10 ** (-1 + 2 * index / (points - 1)) for index in range(points)]
    return [(solution_s * factor, problem.worth(solution_s * factor, k)) for factor in factors]


def scale(problem: Problem, rate: FleetRate, node_counts: Sequence[int]) -> tuple[ScalePoint, ...]:
    """The best goodput at each node count, at the costs of ``problem``, which are taken not to grow with the nodes."""

    def best(mtbf_s: float, factor: float) -> tuple[float, int, float]:
        if factor == 0:
            return 0.0, 1, problem.ceiling(mtbf_s)
        solution = (problem if factor == 1 else problem.cheaper(factor)).solve(mtbf_s)
        return solution.interval_s, solution.k, solution.efficiency

    return goodput_at_scale(node_counts, rate, best)


def _answer_findings(solution: Solution, steps: int | None) -> list[Finding]:
    found = []
    if solution.efficiency < 0.8:
        found.append(
            Finding(
                "W_LOW_EFFICIENCY",
                "warn",
                f"only {solution.efficiency:.0%} of the time is useful: shrink the job, cut the cost, add a tier",
            )
        )
    if solution.binding in ("in_flight", "in_flight_remote", "throttle", "throttle_remote"):
        found.append(
            Finding("W_STORAGE_BOUND", "warn", "storage sets the interval: a write takes longer than the best interval")
        )
    if steps is not None and steps < 10:
        found.append(Finding("W_FEW_STEPS", "warn", f"the interval is only {steps} steps"))
    return found


def _rivals(problem: Problem, solution: Solution) -> tuple[Rival, ...]:
    """Young, Daly and the exact single-tier optimum, and with two tiers the remote one alone."""
    visible, mtbf = problem.visible_s, problem.mtbf_s
    if problem.remote is not None:
        local_rate = 1 - problem.shares[2]
        mtbf = mtbf / local_rate if local_rate > 0 else mtbf
    named = [("young", young(visible, mtbf)), ("daly", daly(visible, mtbf))]
    if problem.policy not in ("exact", "two-tier"):
        named.append(("exact", exact(visible, mtbf)))
    rivals = [Rival(name, interval, problem.worth(interval, solution.k)) for name, interval in named]
    if problem.remote is not None:
        interval, value = problem.system().best_remote_only()
        rivals.append(Rival("remote only", interval, value))
    return tuple(rivals)


def _sensitivity(problem: Problem, solution: Solution) -> tuple[Sensitivity, ...]:
    """Half and double the interval, and an MTBF that is really half or double of what was assumed."""
    base = max(1 - solution.efficiency, 1e-12)
    entries = []
    for factor in (0.5, 2.0):
        value = problem.worth(solution.interval_s * factor, solution.k)
        entries.append(Sensitivity("interval", factor, value, (1 - value) / base))
    for factor in (0.5, 2.0):
        mtbf = problem.mtbf_s * factor
        value = problem.worth(solution.interval_s, solution.k, mtbf)
        best = max(problem.solve(mtbf).efficiency, value)
        entries.append(Sensitivity("mtbf", factor, value, (1 - value) / max(1 - best, 1e-12)))
    return tuple(entries)


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, ..."""
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def with_findings(found: Answer, more: Sequence[Finding]) -> Answer:
    """The same answer with more to say."""
    return replace(found, findings=tuple(dict.fromkeys([*found.findings, *more])))
