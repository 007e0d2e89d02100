"""What an interval must keep to, in a fixed order, and which of it was binding.

Order (physics first, wishes last): one write in flight, throttle, RPO, budget, minimum and maximum. A later
constraint that contradicts an earlier one loses, and a finding says so. Because efficiency rises and then falls with
the interval, the nearest point of the box is the best point in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from policies.domain import Finding

__all__ = ["Box", "Limits", "least_rpo_s", "single_tier_box"]


@dataclass(frozen=True, slots=True)
class Box:
    """A closed range of seconds whose ends know which constraint put them there."""

    low: float = 0.0
    high: float = math.inf
    low_name: str | None = None
    high_name: str | None = None
    findings: tuple[Finding, ...] = ()

    def at_least(self, value: float, name: str) -> Box:
        """Narrowed from below; unchanged, with a finding, where that would leave nothing."""
        if value <= self.low:
            return self
        if value > self.high:
            return self._lost(name, f"at least {value:.4g} s", self.high_name, f"at most {self.high:.4g} s")
        return replace(self, low=value, low_name=name)

    def at_most(self, value: float, name: str) -> Box:
        """Narrowed from above; unchanged, with a finding, where that would leave nothing."""
        if value >= self.high:
            return self
        if value < self.low:
            return self._lost(name, f"at most {value:.4g} s", self.low_name, f"at least {self.low:.4g} s")
        return replace(self, high=value, high_name=name)

    def with_finding(self, finding: Finding) -> Box:
        """The same range with one more thing to say about it."""
        return replace(self, findings=(*self.findings, finding))

    def clamp(self, value: float) -> tuple[float, str | None]:
        """(the nearest point of the box, the constraint that moved it or None)."""
        if value < self.low:
            return self.low, self.low_name
        if value > self.high:
            return self.high, self.high_name
        return value, None

    def _lost(self, name: str, wish: str, winner: str | None, rule: str) -> Box:
        return self.with_finding(
            Finding(
                "W_CONSTRAINT_LOST",
                "warn",
                f"{name} asks for {wish} between saves, but {winner or 'another limit'} allows {rule}; it is not kept",
            )
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """The constraints on one tier. None means: no such constraint.

    ``write_p95_s``: the 95th percentile of the background write (its mean serves where that is unknown);
    ``throttle_period_s``: the least wall time between saves that the share of bandwidth allows (bytes / bytes per
    second); ``rpo_s``: the greatest age, in wall time, of the newest durable copy when a failure strikes; ``budget``:
    the greatest share of time that saves may visibly cost; ``min_s`` and ``max_s``: bounds on the interval.
    """

    write_p95_s: float | None = None
    throttle_period_s: float | None = None
    rpo_s: float | None = None
    budget: float | None = None
    min_s: float | None = None
    max_s: float | None = None


# A write that takes its p95 must still end before the next one starts; a tenth is kept for what p95 does not show.
_P95_MARGIN = 1.1


def least_rpo_s(stall_s: float, write_s: float) -> float:
    """The least RPO that any interval can keep, seconds: ``S + 2L`` (a write in flight, and the one behind it)."""
    return stall_s + 2 * write_s


def single_tier_box(stall_s: float, write_s: float, slowdown: float, limits: Limits) -> Box:
    """The allowed useful work between saves, seconds. An RPO that cannot be kept is left out, with ``R_RPO``."""
    visible = stall_s + slowdown * write_s
    margin = 1.0 if limits.write_p95_s is None else _P95_MARGIN
    slow_write = write_s if limits.write_p95_s is None else max(write_s, limits.write_p95_s)
    box = Box().at_least((1 - slowdown) * slow_write * margin, "in_flight")
    if limits.throttle_period_s is not None:
        box = box.at_least(limits.throttle_period_s - visible, "throttle")
    if limits.rpo_s is not None:
        highest = limits.rpo_s - slow_write - visible
        if highest < box.low or highest <= 0:
            least = max(least_rpo_s(stall_s, slow_write), box.low + visible + slow_write)
            box = box.with_finding(
                Finding(
                    "R_RPO",
                    "refuse",
                    f"an RPO of {limits.rpo_s:g} s cannot be kept: with a stall of {stall_s:g} s and a write of "
                    f"{slow_write:g} s the least achievable RPO is {least:g} s; make the write faster or relax the RPO",
                )
            )
        else:
            box = box.at_most(highest, "rpo")
    if limits.budget is not None:
        box = box.at_least(visible * (1 / limits.budget - 1), "budget")
    if limits.min_s is not None:
        box = box.at_least(limits.min_s, "min")
    if limits.max_s is not None:
        box = box.at_most(limits.max_s, "max")
    return box
