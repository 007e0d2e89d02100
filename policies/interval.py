"""Choose how much work lies between two snapshots, and say why.

``choose`` is what a controller and the command line call; the equations are in ``single_tier``. The answer is clamped
to a box that is narrowed in a fixed order (in-flight floor, caller's floor, budget, min, max), and ``binding`` names
the side that moved it. Efficiency rises and then falls with the interval, so the nearest point of the box is the best
one in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from policies.domain import (
    Finding,
    PolicyError,
    check_fraction,
    check_nonnegative,
    check_positive,
    check_slowdown,
    cost_findings,
)
from policies.single_tier import budget, daly, efficiency, exact, young

__all__ = ["IntervalChoice", "choose", "daly", "efficiency", "exact", "whole_steps", "young"]

_NAMED = ("auto", "exact", "young", "daly", "continuous", "fixed", "budget")


@dataclass(frozen=True, slots=True)
class IntervalChoice:
    """An interval and everything that led to it. Times in seconds.

    ``interval_s`` is useful work from one capture to the next; ``period_s`` the wall time of the same (work and
    visible cost); ``steps`` the interval in whole steps if the step time is known; ``binding`` the constraint that
    moved the interval away from what the policy wanted (``wanted_s``), or None.
    """

    interval_s: float
    period_s: float
    steps: int | None
    policy: str
    reason: str
    binding: str | None
    wanted_s: float
    efficiency: float
    visible_cost_s: float
    mtbf_s: float
    restart_s: float
    effective_restart_s: float
    findings: tuple[Finding, ...] = ()


def choose(
    policy: str | float = "exact",
    *,
    cost_s: float,
    mtbf_s: float,
    restart_s: float = 0.0,
    latency_s: float = 0.0,
    slowdown: float = 0.0,
    downtime_s: float = 0.0,
    step_time_s: float | None = None,
    floor_s: float = 0.0,
    min_s: float | None = None,
    max_s: float | None = None,
) -> IntervalChoice:
    """The interval that ``policy`` wants, inside the constraints, with its reason.

    ``policy``: ``"exact"`` (or ``"auto"``), ``"young"``, ``"daly"``, ``"continuous"`` (as often as writes allow),
    ``"budget:0.05"`` (visible cost within 5 % of the time), ``"fixed:600"`` or a bare number of seconds.
    ``cost_s`` is what training stands still for one save; a background write of ``latency_s`` that slows training by
    the share ``slowdown`` makes the visible cost ``cost_s + slowdown * latency_s``. ``step_time_s`` is the time of a
    step without a save. ``floor_s`` is a further least interval (say from a p95 of the write time).

    Raises ``PolicyError`` for values without meaning. A hopeless but meaningful case (visible cost of two MTBFs) is
    answered, with a finding of level ``"refuse"``: a run that is already training has to do something.
    """
    stall = check_nonnegative("cost_s", cost_s)
    mtbf = check_positive("mtbf_s", mtbf_s)
    restart = check_nonnegative("restart_s", restart_s)
    latency = check_nonnegative("latency_s", latency_s)
    slow = check_slowdown("slowdown", slowdown)
    downtime = check_nonnegative("downtime_s", downtime_s)
    step = None if step_time_s is None else check_positive("step_time_s", step_time_s)
    floor = check_nonnegative("floor_s", floor_s)
    least = None if min_s is None else check_nonnegative("min_s", min_s)
    most = None if max_s is None else check_positive("max_s", max_s)
    if least is not None and most is not None and least > most:
        raise PolicyError("E_EMPTY_RANGE", f"min_s = {least:g} is above max_s = {most:g}; no interval can be both")

    visible = stall + slow * latency
    in_flight = (1 - slow) * latency
    effective_restart = restart + in_flight
    name, wanted, why = _wanted(policy, visible, mtbf)

    low, low_name = 0.0, None
    for candidate, title in ((in_flight, "in_flight"), (floor, "floor"), (least or 0.0, "min")):
        if candidate > low:
            low, low_name = candidate, title
    findings = list(cost_findings(visible, mtbf, effective_restart))
    interval, binding = wanted, None
    if most is not None and interval > most:
        interval, binding = most, "max"
    if interval < low:
        if binding == "max":
            findings.append(
                Finding(
                    "W_MAX_BELOW_FLOOR",
                    "warn",
                    f"max_s = {most:g} cannot be kept: a write takes longer, and only one is in flight at a time",
                )
            )
        interval, binding = low, low_name
    if interval == 0:
        # Saves that cost nothing and block nothing: as often as there is something new to save.
        interval = step if step is not None else mtbf * 1e-6

    def worth(work: float) -> float:
        return efficiency(work, cost_s=visible, mtbf_s=mtbf, restart_s=effective_restart, downtime_s=downtime)

    steps = None if step is None else whole_steps(interval, step, low, most, worth)
    value = worth(interval)
    if binding in ("in_flight", "floor") and low > wanted:
        findings.append(
            Finding(
                "W_STORAGE_BOUND",
                "warn",
                f"the best interval is {wanted:.3g} s, but a write takes until {low:.3g} s: storage sets the interval",
            )
        )
    if steps is not None and steps < 10:
        findings.append(Finding("W_FEW_STEPS", "warn", f"the interval is only {steps} steps: cut the step or the cost"))
    if value < 0.8:
        findings.append(
            Finding(
                "W_LOW_EFFICIENCY",
                "warn",
                f"only {value:.1%} of the time will be useful; shrink the job, cut the visible cost or add a tier",
            )
        )
    moved = "" if binding is None else f"; moved from {wanted:.4g} s by {binding}"
    reason = (
        f"{why}: {interval:.4g} s of work between saves for a visible cost of {visible:.3g} s "
        f"and an MTBF of {mtbf:.4g} s{moved}; {value:.1%} of the time is useful"
    )
    return IntervalChoice(
        interval_s=interval,
        period_s=interval + visible,
        steps=steps,
        policy=name,
        reason=reason,
        binding=binding,
        wanted_s=wanted,
        efficiency=value,
        visible_cost_s=visible,
        mtbf_s=mtbf,
        restart_s=restart,
        effective_restart_s=effective_restart,
        findings=tuple(findings),
    )


def whole_steps(
    interval_s: float,
    step_time_s: float,
    low_s: float,
    high_s: float | None,
    worth: Callable[[float], float],
) -> int:
    """The better of the two whole numbers of steps around ``interval_s``, at least 1; a tie goes to the smaller.

    A neighbour outside [low, high] is taken only if the other one is outside as well.
    """
    below = max(1, math.floor(interval_s / step_time_s))
    candidates = [below, below + 1]
    ceiling = math.inf if high_s is None else high_s
    slack = 1e-9 * step_time_s
    inside = [n for n in candidates if low_s - slack <= n * step_time_s <= ceiling + slack]
    return max(inside or candidates, key=lambda n: (worth(n * step_time_s), -n))


def _wanted(policy: str | float, visible: float, mtbf: float) -> tuple[str, float, str]:
    """(name, interval in seconds, why) before any constraint."""
    if not isinstance(policy, str):
        return "fixed", check_positive("interval", policy), "fixed by the caller"
    name, _, argument = policy.partition(":")
    if name not in _NAMED:
        raise PolicyError("E_POLICY", f"interval policy {policy!r} is not known; use one of {', '.join(_NAMED)}")
    if name == "fixed":
        return name, check_positive("fixed interval", _number(policy, argument)), "fixed by the caller"
    if name == "budget":
        share = check_fraction("budget", _number(policy, argument))
        return name, budget(visible, share), f"visible cost kept within {share:.3g} of the time"
    if argument:
        raise PolicyError("E_POLICY", f"interval policy {policy!r}: {name} takes no value")
    if name == "young":
        return name, young(visible, mtbf), "Young's formula"
    if name == "daly":
        return name, daly(visible, mtbf), "Daly's formula"
    if name == "continuous":
        return name, 0.0, "as often as writes allow"
    return "exact", exact(visible, mtbf), "the exact optimum"


def _number(policy: str, argument: str) -> float:
    try:
        return float(argument)
    except ValueError:
        raise PolicyError(
            "E_POLICY", f"interval policy {policy!r} needs a number after the colon, as in fixed:600 or budget:0.05"
        ) from None
