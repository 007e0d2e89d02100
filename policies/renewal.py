"""Efficiency under any law of failures, and the schedule that a falling hazard calls for.

If the clock of failures starts anew at each failure, with survival function ``S`` and mean ``mu``, then exactly
``eff(W) = W / (mu + D) * sum over n >= 1 of S(R_eff + n (W + a))``: the n-th save of a life is kept if the life lasts
until it is durable. With ``S = exp(-t/M)`` this is the formula of ``single_tier``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.domain import check_positive
from policies.search import maximise_log
from policies.single_tier import exact

__all__ = ["Weibull", "lazy_schedule", "renewal_efficiency", "renewal_optimum", "schedule_efficiency"]

_TAIL = 1e-13
_DIRECT_TERMS = 200_000


@dataclass(frozen=True, slots=True)
class Weibull:
    """Lifetimes with survival ``exp(-(t/scale)^shape)``; below shape 1 the old fail less. Seconds."""

    shape: float
    scale_s: float

    @classmethod
    def with_mean(cls, mean_s: float, shape: float) -> Weibull:
        """The law of this shape whose mean is ``mean_s``."""
        return cls(shape, check_positive("mean_s", mean_s) / math.gamma(1 + 1 / check_positive("shape", shape)))

    @property
    def mean_s(self) -> float:
        """The mean lifetime."""
        return self.scale_s * math.gamma(1 + 1 / self.shape)

    def survival(self, time_s: float) -> float:
        """The probability to live longer than ``time_s``."""
        return math.exp(-((max(time_s, 0.0) / self.scale_s) ** self.shape))

    def hazard(self, time_s: float) -> float:
        """The failure rate at age ``time_s`` above 0, per second."""
        return self.shape / self.scale_s * math.pow(time_s / self.scale_s, self.shape - 1)


def renewal_efficiency(
    interval_s: float,
    *,
    survival: Callable[[float], float],
    mean_s: float,
    cost_s: float,
    restart_s: float = 0.0,
    downtime_s: float = 0.0,
) -> float:
    """Useful time over wall time under any renewal law; ``restart_s`` is effective (with ``(1-s)L``).

    Sums until a term falls below 1e-13; a tail longer than 200,000 saves is closed by the midpoint rule in growing
    blocks.
    """
    if interval_s <= 0:
        return 0.0
    period = interval_s + cost_s
    total = 0.0
    for saves in range(1, _DIRECT_TERMS + 1):
        term = survival(restart_s + saves * period)
        total += term
        if term < _TAIL:
            return interval_s / (mean_s + downtime_s) * total
    block, at = 1024, _DIRECT_TERMS + 1
    while True:
        term = survival(restart_s + (at + (block - 1) / 2) * period)
        total += term * block
        at += block
        if term * at < _TAIL:
            return interval_s / (mean_s + downtime_s) * total
        block = max(block, at // 1000)


def renewal_optimum(
    *,
    survival: Callable[[float], float],
    mean_s: float,
    cost_s: float,
    restart_s: float = 0.0,
    downtime_s: float = 0.0,
) -> float:
    """The best periodic interval under a renewal law, seconds: a search around the exponential optimum of its mean."""
    near = exact(cost_s, mean_s)

    def worth(interval: float) -> float:
        return renewal_efficiency(
            interval,
            survival=survival,
            mean_s=mean_s,
            cost_s=cost_s,
            restart_s=restart_s,
            downtime_s=downtime_s,
        )

    return maximise_log(worth, near / 5, near * 5)


def lazy_schedule(law: Weibull, *, cost_s: float, restart_s: float = 0.0, saves: int = 200) -> tuple[float, ...]:
    """Intervals for the first, second, ... save after a failure: each the optimum for the hazard in its middle.

    Tiwari et al., DSN 2014. Opt-in: at shape 0.7 it earns 0.14 points over a fixed interval, at 0.5 half a point, and
    it is wrong where the shape is.
    """
    schedule: list[float] = []
    age, interval = restart_s, exact(cost_s, law.mean_s)
    while len(schedule) < saves:
        for _ in range(60):
            interval = exact(cost_s, 1 / law.hazard(age + (interval + cost_s) / 2))
        schedule.append(interval)
        age += interval + cost_s
    return tuple(schedule)


def schedule_efficiency(
    schedule: Sequence[float],
    *,
    survival: Callable[[float], float],
    mean_s: float,
    cost_s: float,
    restart_s: float = 0.0,
    downtime_s: float = 0.0,
) -> float:
    """Efficiency of a schedule of intervals that starts anew at each failure; its last interval repeats."""
    total, age = 0.0, restart_s
    for interval in schedule:
        age += interval + cost_s
        total += interval * survival(age)
    rest = renewal_efficiency(schedule[-1], survival=survival, mean_s=mean_s, cost_s=cost_s, restart_s=age)
    return (total + rest * mean_s) / (mean_s + downtime_s)
