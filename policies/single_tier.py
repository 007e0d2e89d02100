"""How much work to do between two saves, when there is one place to save to.

Symbols, as in the literature: ``W`` useful work between saves (what is called *interval* here), ``a`` the visible
cost of one save, ``M`` the job's MTBF, ``R`` restart that a failure can hit, ``D`` downtime that no failure can hit,
``c = a/M``. Failures are exponential and may strike work, saves and restarts. Then one segment takes on average ``E =
(M + D) e^(R/M) (e^((W+a)/M) - 1)`` and ``W/E`` is the efficiency; its optimum depends on ``a`` and ``M`` alone.

An asynchronous save (stall ``S``, background write of length ``L`` that slows training by the share ``s``) is the same
model exactly, with ``a = S + sL`` and ``R`` replaced by ``R + (1-s)L``.

Sources: J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006, eq. 37. Daly's formula is the first three terms
of the series of the exact optimum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.search import maximise_log

__all__ = [
    "FiniteJob",
    "LostTime",
    "budget",
    "daly",
    "efficiency",
    "efficiency_unreliable",
    "exact",
    "exact_unreliable",
    "finite_job",
    "lost_time",
    "young",
]

# W*/M in powers of sqrt(2c). Doubles lose digits in 1 + lambertw(-exp(-1-c)) near its branch point, the series does
# not.
_SERIES = (1.0, -1 / 3, 1 / 36, 1 / 270, 1 / 4320, -1 / 17010, -139 / 5443200)
_SERIES_BELOW = 1e-2
_EXPONENT_LIMIT = 700.0


def young(cost_s: float, mtbf_s: float) -> float:
    """Young's interval ``sqrt(2 a M)``, seconds; 5 % too long already at ``a = M/100``. For comparison."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Daly's higher-order interval (2006, eq. 37), seconds: within 6.2 % of the optimum, worst near ``a = 2M``."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    root = math.sqrt(cost_s / (2 * mtbf_s))
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + root / 3 + root * root / 9) - cost_s


def exact(cost_s: float, mtbf_s: float) -> float:
    """The useful work between saves that maximises efficiency, seconds: ``M (1 + W0(-e^(-1-a/M)))``.

    ``cost_s`` (visible) at least 0, ``mtbf_s`` above 0. Relative error below 1e-11 for ``a/M`` from 1e-16 to 1e3.
    Restart, downtime and write latency do not move it.
    """
    ratio = cost_s / mtbf_s
    if ratio < _SERIES_BELOW:
        root = math.sqrt(2 * ratio)
        total = 0.0
        for coefficient in reversed(_SERIES):
            total = (total + coefficient) * root
        return mtbf_s * total
    # y = 1 - W/M solves ln y - y + 1 + c = 0. The left side is concave and we start left of the root, so that Newton's
    # steps only ever grow towards it.
    y = math.exp(-1 - ratio)
    if y == 0.0:
        return mtbf_s
    for _ in range(60):
        step = (math.log(y) - y + 1 + ratio) / (1 / y - 1)
        y -= step
        if abs(step) <= 1e-16 * y:
            break
    return mtbf_s * (1 - y)


def efficiency(
    interval_s: float, *, cost_s: float, mtbf_s: float, restart_s: float = 0.0, downtime_s: float = 0.0
) -> float:
    """Useful time over wall time when ``interval_s`` of work lies between saves, 0 to 1.

    ``restart_s`` is the effective restart: the write latency's ``(1-s)L`` is part of it.
    """
    if interval_s <= 0:
        return 0.0
    exponent = (interval_s + cost_s) / mtbf_s
    if exponent + restart_s / mtbf_s > _EXPONENT_LIMIT:
        return 0.0
    useful = interval_s / (interval_s + cost_s)
    return useful / ((1 + downtime_s / mtbf_s) * math.exp(restart_s / mtbf_s) * _stretch(exponent))


def _stretch(exponent: float) -> float:
    """``(e^x - 1) / x``, which is 1 at 0: nothing is divided by an ``e^x - 1`` too small for that."""
    return math.expm1(exponent) / exponent if exponent else 1.0


def budget(cost_s: float, share: float) -> float:
    """The least work between saves that keeps the visible cost within ``share`` of the time: ``a (1/x - 1)``."""
    return cost_s * (1 / share - 1)


@dataclass(frozen=True, slots=True)
class LostTime:
    """Where the time goes, as shares of wall time. ``useful`` and the four losses add up to 1."""

    useful: float
    save: float
    rework: float
    restart: float
    latency: float


def lost_time(
    interval_s: float,
    *,
    cost_s: float,
    mtbf_s: float,
    restart_s: float = 0.0,
    latency_s: float = 0.0,
    downtime_s: float = 0.0,
) -> LostTime:
    """The wall time split into useful work, saves, work done again, restarts and the latency of writes.

    ``restart_s`` without the latency; ``latency_s`` is ``(1-s)L``. Saves are counted once per kept segment; what a
    failure threw away of work or of a save is rework; latency is what the wait for durability adds to it.
    """

    segment = interval_s + cost_s
    without_restart = segment * _stretch(min(segment / mtbf_s, _EXPONENT_LIMIT))

    def wall_per_segment(restart: float) -> float:
        return (1 + downtime_s / mtbf_s) * math.exp(min(restart / mtbf_s, _EXPONENT_LIMIT)) * without_restart

    wall = wall_per_segment(restart_s + latency_s)
    without_latency = wall_per_segment(restart_s)
    return LostTime(
        useful=interval_s / wall,
        save=cost_s / wall,
        rework=(without_restart - segment) / wall,
        restart=(without_latency - without_restart) / wall,
        latency=(wall - without_latency) / wall,
    )


@dataclass(frozen=True, slots=True)
class FiniteJob:
    """The plan for a job of known length: ``segments`` equal pieces of ``interval_s``, done after ``expected_s``."""

    segments: int
    interval_s: float
    expected_s: float


def finite_job(
    work_s: float, *, cost_s: float, mtbf_s: float, restart_s: float = 0.0, downtime_s: float = 0.0
) -> FiniteJob:
    """The number of equal segments that finishes ``work_s`` of work soonest, each ended by a save.

    The first segment needs no restart before it, which one ``e^(R/M)`` too many leaves out of account (below 1/N).
    """
    ideal = work_s / exact(cost_s, mtbf_s) if cost_s > 0 else work_s / mtbf_s
    candidates = sorted({max(1, math.floor(ideal)), max(1, math.ceil(ideal))})

    def expected(segments: int) -> float:
        exponent = (work_s / segments + cost_s) / mtbf_s
        if exponent + restart_s / mtbf_s > _EXPONENT_LIMIT:
            return math.inf
        return (mtbf_s + downtime_s) * math.exp(restart_s / mtbf_s) * segments * math.expm1(exponent)

    best = min(candidates, key=expected)
    return FiniteJob(segments=best, interval_s=work_s / best, expected_s=expected(best))


def efficiency_unreliable(
    interval_s: float,
    *,
    usable: float,
    cost_s: float,
    mtbf_s: float,
    restart_s: float = 0.0,
    downtime_s: float = 0.0,
) -> float:
    """Efficiency when a save turns out usable with probability ``usable``, independently; else the one before."""
    if interval_s <= 0:
        return 0.0
    exponent = (interval_s + cost_s) / mtbf_s
    survive = math.exp(-exponent)
    broken = 1 - usable
    # Times x, so that the first term, survive / (1 - survive), stays finite as x goes to 0.
    kept = survive / _stretch(-exponent) - exponent * broken * survive / (1 - broken * survive)
    return interval_s / (interval_s + cost_s) / (1 + downtime_s / mtbf_s) * math.exp(-restart_s / mtbf_s) * kept


def exact_unreliable(cost_s: float, mtbf_s: float, usable: float) -> float:
    """The best interval when each save is usable with probability ``usable``; equal to ``exact`` at 1. Seconds."""
    if usable == 1 or cost_s == 0:
        return exact(cost_s, mtbf_s)
    near = exact(cost_s, mtbf_s) * math.sqrt(1 / (2 / usable - 1))
    return maximise_log(
        lambda interval: efficiency_unreliable(interval, usable=usable, cost_s=cost_s, mtbf_s=mtbf_s),
        near / 8,
        near * 8,
    )
