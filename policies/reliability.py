"""The failure rate: what is known, from how much, and how sure one can be.

Exposure is node-seconds *running* (downtime and restarts do not count). A failure is an event that nobody announced
and that is not the user's own error; storms of restarts are one failure; planned stops and the end of a job are
censoring.

Rates are per node-second. Overhead at a fixed interval is linear in the rate, so the number to plan with is the
posterior *mean rate*: ``M = 1 / E[rate]``, not ``E[1 / rate]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.domain import check_fraction, check_nonnegative, check_positive
from policies.gamma_law import gamma_quantile

__all__ = [
    "DEFAULT_PRIOR",
    "DEFAULT_SHARES",
    "ClassShares",
    "GammaRate",
    "RateEstimate",
    "forgotten",
    "half_life_s",
    "rate_interval",
    "rate_upper_bound_without_failures",
]

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class GammaRate:
    """A belief about the failures per node-second: Gamma with shape ``alpha`` and rate ``beta_node_s``.

    ``alpha`` is worth as many failures, ``beta_node_s`` as much exposure. Conjugate: observing only adds.
    """

    alpha: float
    beta_node_s: float

    def observe(self, failures: float, exposure_node_s: float) -> GammaRate:
        """The belief after ``failures`` in ``exposure_node_s`` more node-seconds."""
        return GammaRate(self.alpha + failures, self.beta_node_s + exposure_node_s)

    def decayed(self, factor: float) -> GammaRate:
        """The same mean, worth ``factor`` (0 to 1) of what it was worth."""
        return GammaRate(self.alpha * factor, self.beta_node_s * factor)

    @property
    def rate_per_node_s(self) -> float:
        """The mean rate."""
        return self.alpha / self.beta_node_s

    def mtbf_s(self, nodes: float) -> float:
        """Seconds between failures of a job on ``nodes`` nodes, from the mean rate."""
        return self.beta_node_s / (self.alpha * nodes)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The central credible interval of the rate per node-second: (low, high)."""
        tail = (1 - level) / 2
        low, high = gamma_quantile(self.alpha, tail), gamma_quantile(self.alpha, 1 - tail)
        return low / self.beta_node_s, high / self.beta_node_s

    def mtbf_interval_s(self, nodes: float, level: float = 0.95) -> tuple[float, float]:
        """The central credible interval of the job's MTBF on ``nodes`` nodes: (low, high) seconds."""
        low, high = self.interval(level)
        return 1 / (high * nodes), 1 / (low * nodes) if low > 0 else math.inf

    def no_failure_probability(self, nodes: float, horizon_s: float) -> float:
        """The predictive probability that ``nodes`` nodes run ``horizon_s`` without a failure."""
        return float((self.beta_node_s / (self.beta_node_s + nodes * horizon_s)) ** self.alpha)

    @classmethod
    def prior(cls, rate_per_node_s: float, worth_failures: float = 1.0) -> GammaRate:
        """A prior belief in ``rate_per_node_s`` that weighs as much as ``worth_failures`` observed failures."""
        rate = check_positive("rate_per_node_s", rate_per_node_s)
        weight = check_positive("worth_failures", worth_failures)
        return cls(weight, weight / rate)


# 6.5 failures per 1000 node-days: Meta's RSC-1 (arXiv 2410.21680), the middle of the published fleets in ``presets``
# and on the pessimistic side of their geometric mean (5.2), because a young fleet fails more often. Worth one
# failure: after three observed ones it hardly counts.
DEFAULT_PRIOR = GammaRate.prior(6.5 / 1000 / DAY_S)


@dataclass(frozen=True, slots=True)
class RateEstimate:
    """A rate with its exact confidence interval, in failures per unit of the exposure it was given."""

    failures: float
    exposure: float
    rate: float
    low: float
    high: float


def rate_interval(failures: int, exposure: float, level: float = 0.95) -> RateEstimate:
    """The maximum-likelihood rate and its exact two-sided interval for a time-censored Poisson count.

    ``[chi2(tail, 2n) / 2T, chi2(1 - tail, 2n + 2) / 2T]`` (Garwood 1936). ``exposure`` in any unit of time.
    """
    count = check_nonnegative("failures", failures)
    total = check_positive("exposure", exposure)
    tail = (1 - check_fraction("level", level)) / 2
    low = gamma_quantile(count, tail) / total if count > 0 else 0.0
    high = gamma_quantile(count + 1, 1 - tail) / total
    return RateEstimate(count, total, count / total, low, high)


def rate_upper_bound_without_failures(exposure: float, level: float = 0.95) -> float:
    """The one-sided bound on the rate after ``exposure`` without a failure: ``-ln(1 - level) / T``."""
    return -math.log1p(-level) / check_positive("exposure", exposure)


def half_life_s(mtbf_s: float) -> float:
    """The half-life of memory that keeps about 30 failures in effect: ``30 ln2 M``, within a day and thirty days."""
    return min(max(30 * math.log(2) * mtbf_s, DAY_S), 30 * DAY_S)


def forgotten(
    failure_times_s: Sequence[float], *, now_s: float, half_life: float, start_s: float = 0.0, nodes: float = 1.0
) -> tuple[float, float]:
    """(failures, node-seconds of exposure) since ``start_s``, each second weighted ``2^(-age / half_life)``.

    ``half_life`` in seconds. For an exposure that was constant at ``nodes``; the online loop decays step by step
    instead.
    """
    failures = sum(2.0 ** (-(now_s - time) / half_life) for time in failure_times_s)
    exposure = nodes * half_life / math.log(2) * -math.expm1(-math.log(2) * (now_s - start_s) / half_life)
    return failures, exposure


@dataclass(frozen=True, slots=True)
class ClassShares:
    """Which share of the failures is of which class: a Dirichlet belief, as counts.

    Class 1: a process or rank; 2: a node; 3: several nodes, a rack, the replica as well, or storage of the local tier.
    """

    process: float
    node: float
    domain: float

    def observe(self, process: float = 0, node: float = 0, domain: float = 0) -> ClassShares:
        """The belief after so many more failures of each class."""
        return ClassShares(self.process + process, self.node + node, self.domain + domain)

    def observe_counts(self, counts: Mapping[str, float]) -> ClassShares:
        """The same, from counts by the names ``process``, ``node`` and ``domain``."""
        return self.observe(counts.get("process", 0), counts.get("node", 0), counts.get("domain", 0))

    @property
    def mean(self) -> tuple[float, float, float]:
        """The expected shares (process, node, domain); they add up to 1."""
        total = self.process + self.node + self.domain
        return self.process / total, self.node / total, self.domain / total


# Worth ten failures: mostly nodes, 3 % of correlated losses (LANL's logs: 1.0 to 5.7 % of the failures hit two nodes
# or more within a minute).
DEFAULT_SHARES = ClassShares(2.0, 7.7, 0.3)
