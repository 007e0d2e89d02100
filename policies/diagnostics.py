"""Does a record of failures look like what the model assumes? Tests that warn and never decide.

Times in any one unit; ``p`` values are two-sided unless said. At small counts the tests disagree with each other,
which is why none of them changes an interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from policies.domain import PolicyError, check_positive
from policies.gamma_law import gamma_cdf, gamma_survival

__all__ = [
    "Dispersion",
    "LemonNode",
    "Trend",
    "WeibullFit",
    "burst_share",
    "decluster",
    "dispersion",
    "lemon_nodes",
    "rate_change_p",
    "squared_variation",
    "trend",
    "weibull_fit",
]


def decluster(times: Sequence[float], window: float) -> list[float]:
    """The first failure of each episode: one closer than ``window`` to the one before it belongs to the same storm.

    ``times`` sorted. The rule for failures of a job is ``max(60 s, 2 R)``; what is dropped lengthens restarts instead.
    """
    kept: list[float] = []
    previous = -math.inf
    for time in times:
        if time - previous >= window:
            kept.append(time)
        previous = time
    return kept


def burst_share(times: Sequence[float], window: float) -> float:
    """The share of the gaps between failures that are shorter than ``window``."""
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return sum(gap < window for gap in gaps) / len(gaps) if gaps else 0.0


def squared_variation(gaps: Sequence[float]) -> float:
    """Variance over squared mean of the gaps: 1 for a Poisson process, above 2 worth a warning."""
    mean = sum(gaps) / len(gaps)
    return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2 if mean > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Trend:
    """Laplace's test and the power-law exponent: ``u`` above 1.96 is a rising rate; ``beta`` of 1 a constant one."""

    u: float
    p: float
    beta: float


def trend(times: Sequence[float], end: float) -> Trend:
    """Whether failures at ``times`` (from 0) in an observation that ended at ``end`` become more or fewer.

    Laplace's U for a time-truncated record, and the maximum-likelihood exponent of Crow's power law.
    """
    check_positive("end", end)
    count = len(times)
    if count == 0:
        raise PolicyError("E_TOO_FEW", "a trend needs at least one failure")
    u = (sum(times) - count * end / 2) / (end * math.sqrt(count / 12))
    logs = sum(math.log(end / time) for time in times if time > 0)
    return Trend(u, math.erfc(abs(u) / math.sqrt(2)), count / logs if logs > 0 else math.inf)


@dataclass(frozen=True, slots=True)
class Dispersion:
    """Counts per window against Poisson: ``fano`` is variance over mean, ``p`` that of more spread by chance."""

    chi2: float
    degrees: int
    p: float
    fano: float


def dispersion(counts: Sequence[int]) -> Dispersion:
    """The index-of-dispersion test on failures per equal window."""
    if len(counts) < 2 or sum(counts) == 0:
        raise PolicyError("E_TOO_FEW", "a dispersion test needs two windows and one failure")
    mean = sum(counts) / len(counts)
    chi2 = sum((count - mean) ** 2 for count in counts) / mean
    degrees = len(counts) - 1
    return Dispersion(chi2, degrees, gamma_survival(degrees / 2, chi2 / 2), chi2 / degrees)


def rate_change_p(count_1: int, exposure_1: float, count_2: int, exposure_2: float) -> float:
    """The two-sided p of equal rates in two windows: given the total, ``count_2`` is Binomial(T2 / (T1 + T2))."""
    total = count_1 + count_2
    share = exposure_2 / (exposure_1 + exposure_2)

    def log_probability(successes: int) -> float:
        return (
            math.lgamma(total + 1)
            - math.lgamma(successes + 1)
            - math.lgamma(total - successes + 1)
            + successes * math.log(share)
            + (total - successes) * math.log1p(-share)
        )

    observed = log_probability(count_2)
    return min(
        1.0,
        math.fsum(math.exp(value) for n in range(total + 1) if (value := log_probability(n)) <= observed + 1e-7),
    )


@dataclass(frozen=True, slots=True)
class WeibullFit:
    """A Weibull law fitted to lifetimes, some of them censored.

    ``shape_low`` and ``shape_high``: 95 % from the curvature of the profile likelihood in ln(shape). ``p`` of the
    likelihood-ratio test against the exponential.
    """

    shape: float
    scale: float
    shape_low: float
    shape_high: float
    likelihood_ratio: float
    p: float
    failures: int


def weibull_fit(lifetimes: Sequence[float], censored: Sequence[float] = ()) -> WeibullFit:
    """The maximum-likelihood fit to ``lifetimes`` that ended in failure and ``censored`` ones that did not."""
    failures = len(lifetimes)
    if failures < 2 or any(not (math.isfinite(t) and t > 0) for t in (*lifetimes, *censored)):
        raise PolicyError("E_TOO_FEW", "a Weibull fit needs two failures, and all lifetimes above 0")
    unit = sum(lifetimes) / failures
    ends = [time / unit for time in lifetimes]
    everything = ends + [time / unit for time in censored]
    logs = [math.log(time) for time in everything]
    mean_log = sum(math.log(time) for time in ends) / failures
    if max(logs) - min(logs) < 1e-9:
        raise PolicyError("E_TOO_FEW", "all lifetimes are equal; a Weibull shape cannot be fitted to them")

    def score(shape: float) -> float:
        weights = [math.exp(shape * value) for value in logs]
        return sum(w * v for w, v in zip(weights, logs, strict=True)) / sum(weights) - 1 / shape - mean_log

    def profile(shape: float) -> float:
        total = sum(math.exp(shape * value) for value in logs)
        return failures * (math.log(shape) - math.log(total / failures) - 1) + (shape - 1) * mean_log * failures

    low, high = 1e-3, 1.0
    while score(high) < 0:
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if score(middle) < 0 else (low, middle)
    shape = (low + high) / 2
    scale = (sum(math.exp(shape * value) for value in logs) / failures) ** (1 / shape)
    ratio = max(0.0, 2 * (profile(shape) - profile(1.0)))
    step = 1e-3
    curvature = (profile(shape * math.exp(step)) - 2 * profile(shape) + profile(shape * math.exp(-step))) / step**2
    spread = math.exp(1.959963984540054 / math.sqrt(max(-curvature, 1e-12)))
    return WeibullFit(
        shape=shape,
        scale=scale * unit,
        shape_low=shape / spread,
        shape_high=shape * spread,
        likelihood_ratio=ratio,
        p=math.erfc(math.sqrt(ratio / 2)),
        failures=failures,
    )


@dataclass(frozen=True, slots=True)
class LemonNode:
    """A node that fails more than its share: ``times_fleet`` is its rate over the others', ``p`` that by chance."""

    node: str
    failures: int
    times_fleet: float
    p: float


def lemon_nodes(failures_by_node: Mapping[str, int], nodes: int) -> tuple[LemonNode, ...]:
    """Nodes with at least three times the rate of the others and p below 1 % after Bonferroni's correction.

    Each node is compared with the rest of the fleet, so that a lemon does not hide itself; equal exposure is assumed.
    """
    total = sum(failures_by_node.values())
    lemons = []
    for node, count in failures_by_node.items():
        others = (total - count) / max(nodes - 1, 1)
        # With no failure elsewhere, half a failure among the others stands for their rate.
        fleet = others if others > 0 else 0.5 / max(nodes - 1, 1)
        p = min(1.0, nodes * gamma_cdf(count, fleet)) if count else 1.0
        if nodes > 1 and count >= 3 * fleet and p < 0.01:
            lemons.append(LemonNode(node, count, count / fleet, p))
    return tuple(sorted(lemons, key=lambda lemon: (-lemon.failures, lemon.node)))
