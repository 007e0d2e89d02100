"""How often to save to node memory and its peer, and every how many of those to durable storage.

Each period: work ``W``, stall ``S1``, a background replication ``L1`` that slows training by ``s1``. Every ``k``-th
period also a stall ``S2`` and an upload ``L2`` that slows it by ``s2``. Failures of class 1 (a process) and 2 (a
node) restore from the local tier in ``R1`` and ``R2``; class 3 (several nodes, a rack, the replica as well) restores
from the remote one in ``R3``.

The expected wall time of ``k`` periods follows from one backward recursion over the segments, O(k), exact for blocking
saves. Background writes enter as visible cost ``a = S + sL`` and as extra restart time ``(1-s)L``: exact with one
tier, and within 1e-4 of a simulation for two while an upload is short beside the MTBF.

To first order the tiers decouple: ``P = sqrt(2 aL / (l1 + l2))`` and ``kP = sqrt(2 aR / l3)`` (Benoit et al., IEEE TC
66(7), 2017, give the same square roots for any number of levels).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from policies.constraints import Box
from policies.domain import PolicyError
from policies.search import maximise_log
from policies.single_tier import LostTime, exact
from policies.single_tier import efficiency as single_tier_efficiency

__all__ = ["FailureModel", "Tier", "TwoTier", "TwoTierBox", "TwoTierOptimum", "first_order", "optimum"]

_EXPONENT_LIMIT = 700.0
# No fleet has needed more; beyond it the remote tier is as good as unused and the recursion only gets longer.
_MOST_PERIODS = 20_000
_UNBOUNDED = Box()


@dataclass(frozen=True, slots=True)
class Tier:
    """One place to save to. ``stall_s`` stops training; ``write_s`` runs behind it and costs the share ``slowdown``."""

    stall_s: float
    write_s: float = 0.0
    slowdown: float = 0.0

    @property
    def visible_s(self) -> float:
        """The training time that one save costs: ``S + sL``."""
        return self.stall_s + self.slowdown * self.write_s

    @property
    def latency_s(self) -> float:
        """The work done while a save is not yet durable: ``(1-s)L``."""
        return (1 - self.slowdown) * self.write_s


@dataclass(frozen=True, slots=True)
class FailureModel:
    """Failures per second of the job by class, and the seconds that a restore takes by class.

    ``downtime_s`` is what comes before a restore and cannot be hit by a failure (detection, a queue).
    """

    process_per_s: float
    node_per_s: float
    domain_per_s: float
    restart_process_s: float
    restart_node_s: float
    restart_domain_s: float
    downtime_s: float = 0.0

    @property
    def local_per_s(self) -> float:
        """Failures that the local tier survives."""
        return self.process_per_s + self.node_per_s

    @property
    def total_per_s(self) -> float:
        """All failures."""
        return self.process_per_s + self.node_per_s + self.domain_per_s


@dataclass(frozen=True, slots=True)
class TwoTier:
    """A job with a local and a remote tier under a failure model."""

    local: Tier
    remote: Tier
    failures: FailureModel

    def wall_s(self, interval_s: float, k: int, *, latency: bool = True, restarts: bool = True) -> float:
        """The expected wall time of ``k`` periods of ``interval_s`` work, or infinity.

        ``latency=False`` and ``restarts=False`` leave these out, to see what they cost.
        """
        model = self.failures
        total = model.total_per_s
        share_1, share_2, share_3 = (
            rate / total for rate in (model.process_per_s, model.node_per_s, model.domain_per_s)
        )
        local_latency = self.local.latency_s if latency else 0.0
        restart_1, restart_2, restart_3 = (
            (model.restart_process_s + local_latency, model.restart_node_s + local_latency, model.restart_domain_s)
            if restarts
            else (local_latency, local_latency, 0.0)
        )
        restart_3 += self.remote.latency_s if latency else 0.0
        last = interval_s + self.local.visible_s + self.remote.visible_s
        if total * max(last, restart_3) > _EXPONENT_LIMIT:
            return math.inf

        hop = 1 / total + (model.downtime_s if restarts else 0.0)
        fails_1, fails_2 = -math.expm1(-total * restart_1), -math.expm1(-total * restart_2)
        # Expected time after a failure, hop + sum of q_c Q_c, is (hop + stay V_i + share_3 (remote + V_0)) / leave,
        # where V_i is the time still needed from the segment's start and Q_c = F(R_c)(hop + sum q Q) + (1 - F(R_c))
        # V_i.
        leave = 1 - share_1 * fails_1 - share_2 * fails_2
        stay = share_1 * (1 - fails_1) + share_2 * (1 - fails_2)
        remote_restore = hop * math.expm1(total * restart_3)
        # V_i = alpha + beta V_0, from the last segment to the first.
        alpha = beta = 0.0
        for length, repeats in ((last, 1), (interval_s + self.local.visible_s, k - 1)):
            fails = -math.expm1(-total * length)
            scale = 1 / (1 - fails * stay / leave)
            add_alpha = scale * fails * (hop + share_3 * remote_restore) / leave
            add_beta = scale * fails * share_3 / leave
            carry = scale * (1 - fails)
            for _ in range(repeats):
                alpha, beta = add_alpha + carry * alpha, add_beta + carry * beta
        return alpha / (1 - beta) if beta < 1 else math.inf

    def efficiency(self, interval_s: float, k: int) -> float:
        """Useful time over wall time, 0 to 1."""
        return k * interval_s / self.wall_s(interval_s, k)

    def remote_only(self, interval_s: float) -> float:
        """The efficiency when every save goes to both tiers and every failure restores from the remote one."""
        return single_tier_efficiency(
            interval_s,
            cost_s=self.local.visible_s + self.remote.visible_s,
            mtbf_s=1 / self.failures.total_per_s,
            restart_s=self.failures.restart_domain_s + self.remote.latency_s,
            downtime_s=self.failures.downtime_s,
        )

    def best_remote_only(self) -> tuple[float, float]:
        """(interval in seconds, efficiency) of the best such job, with one upload in flight at a time."""
        ideal = exact(self.local.visible_s + self.remote.visible_s, 1 / self.failures.total_per_s)
        interval = max(ideal, self.remote.latency_s)
        return interval, self.remote_only(interval)

    def lost_time(self, interval_s: float, k: int) -> LostTime:
        """Where the wall time goes, as shares that add up to 1."""
        wall = self.wall_s(interval_s, k)
        without_latency = self.wall_s(interval_s, k, latency=False)
        work_and_rework = self.wall_s(interval_s, k, latency=False, restarts=False)
        useful = k * interval_s
        saves = k * self.local.visible_s + self.remote.visible_s
        return LostTime(
            useful=useful / wall,
            save=saves / wall,
            rework=(work_and_rework - useful - saves) / wall,
            restart=(without_latency - work_and_rework) / wall,
            latency=(wall - without_latency) / wall,
        )


def first_order(system: TwoTier) -> tuple[float, float, float]:
    """(local period, remote period, k) by the square roots, seconds; infinite where no failure calls for the tier."""
    model = system.failures
    local = math.sqrt(2 * system.local.visible_s / model.local_per_s) if model.local_per_s else math.inf
    remote = math.sqrt(2 * system.remote.visible_s / model.domain_per_s) if model.domain_per_s else math.inf
    return local, remote, remote / local if local and local < math.inf else math.inf


@dataclass(frozen=True, slots=True)
class TwoTierBox:
    """What ``W`` and ``k`` must keep to: a box for the work between local saves, one for that between remote saves.

    ``remote_work`` bounds ``kW``. ``remote_wall`` bounds ``k (W + aL)``, which is what an upload in flight and an RPO
    see.
    """

    local: Box = _UNBOUNDED
    remote_work: Box = _UNBOUNDED
    remote_wall: Box = _UNBOUNDED
    budget: float | None = None

    def bounds(self, system: TwoTier, k: int) -> Box:
        """The allowed ``W`` at this ``k``; ``low`` above ``high`` means none."""
        visible = system.local.visible_s
        low, low_name, high, high_name = self.local.low, self.local.low_name, self.local.high, self.local.high_name
        lows = [
            (self.remote_work.low / k, self.remote_work.low_name),
            (self.remote_wall.low / k - visible, self.remote_wall.low_name),
        ]
        if self.budget is not None:
            lows.append(((visible + system.remote.visible_s / k) * (1 / self.budget - 1), "budget"))
        for value, name in lows:
            if value > low:
                low, low_name = value, name
        for value, name in (
            (self.remote_work.high / k, self.remote_work.high_name),
            (self.remote_wall.high / k - visible, self.remote_wall.high_name),
        ):
            if value < high:
                high, high_name = value, name
        return Box(low, high, low_name, high_name)


@dataclass(frozen=True, slots=True)
class TwoTierOptimum:
    """The best ``interval_s`` and ``k``, their efficiency, and the constraint that moved them (or None)."""

    interval_s: float
    k: int
    efficiency: float
    binding: str | None


def optimum(system: TwoTier, box: TwoTierBox | None = None, *, fixed_k: int | None = None) -> TwoTierOptimum:
    """The most efficient ``(W, k)`` inside ``box``: a bounded search on ``W`` for each ``k``, walking ``k`` uphill.

    Without failures of class 3 nothing but an RPO of the remote tier can set ``k``; without those of class 1 and 2, k
    = 1. Raises ``PolicyError`` where no ``(W, k)`` is allowed.
    """
    box = box or TwoTierBox()
    model = system.failures
    if model.total_per_s <= 0:
        raise PolicyError("E_NOT_POSITIVE", "all failure rates are 0; without failures there is nothing to choose")
    remote_bounded = min(box.remote_work.high, box.remote_wall.high) < math.inf
    if model.domain_per_s == 0 and not remote_bounded and fixed_k is None:
        raise PolicyError(
            "E_NO_REMOTE_RATE",
            "no failure ever needs the remote tier; give it an RPO, or a rate of such failures above 0",
        )
    guess, start = _start(system, box)
    if model.local_per_s == 0 and fixed_k is None:
        start = 1
    found: dict[int, TwoTierOptimum | None] = {}

    def at(k: int) -> TwoTierOptimum | None:
        if not 1 <= k <= _MOST_PERIODS:
            return None
        if k not in found:
            found[k] = _best_interval(system, box, k, guess)
        return found[k]

    def climb(best: TwoTierOptimum) -> TwoTierOptimum:
        # The guess may be thousands of periods off, and each period costs a search: strides grow while they pay.
        stride = 1
        while stride:
            steps = [step for step in (at(best.k + stride), at(best.k - stride)) if step is not None]
            step = max(steps, key=lambda choice: choice.efficiency, default=best)
            if step.efficiency > best.efficiency:
                best, stride = step, 2 * stride
            else:
                stride //= 2
        return best

    if fixed_k is not None:
        best = at(fixed_k)
    else:
        best = at(start) or next((choice for k in _allowed_periods(system, box, start) if (choice := at(k))), None)
        best = best and climb(best)
    if best is None:
        raise PolicyError("E_EMPTY_RANGE", "no interval keeps all constraints at once; relax the RPO or the bounds")
    return best


def _start(system: TwoTier, box: TwoTierBox) -> tuple[float, int]:
    """First-order guesses of W and k, moved to where the constraints on each alone allow them."""
    mtbf = 1 / system.failures.total_per_s
    period, remote_period, _ = first_order(system)
    if not math.isfinite(period):
        # Without failures of class 1 and 2 the local tier saves nothing: one local save per remote one.
        period = exact(system.local.visible_s + system.remote.visible_s, mtbf)
    guess = max(box.local.clamp(max(period, 1e-6 * mtbf))[0], 1e-9 * mtbf)
    wanted = box.remote_wall.clamp(box.remote_work.clamp(remote_period)[0])[0]
    ratio = wanted / guess if math.isfinite(wanted) else float(_MOST_PERIODS)
    return guess, min(max(1, round(ratio)), _MOST_PERIODS)


def _allowed_periods(system: TwoTier, box: TwoTierBox, start: int) -> Iterator[int]:
    """Other values of ``k`` to try, nearest first in the ratio, where ``start`` allows no interval at all."""
    span = 1
    while span < _MOST_PERIODS:
        yield start + span
        if start > span:
            yield start - span
        span = max(span + 1, span * 5 // 4)
    yield 1


def _best_interval(system: TwoTier, box: TwoTierBox, k: int, guess: float) -> TwoTierOptimum | None:
    allowed = box.bounds(system, k)
    # Rounding must not turn a range that is one point into none.
    slack = 1e-9 * allowed.low
    if allowed.low > allowed.high + slack or allowed.high <= 0:
        return None
    low = max(allowed.low, min(guess / 50, allowed.high))
    high = max(min(allowed.high, max(guess * 50, low)), low)
    interval = maximise_log(lambda work: system.efficiency(work, k), low, high)
    binding = None
    if interval <= allowed.low * (1 + 1e-6):
        binding = allowed.low_name
    elif interval >= allowed.high * (1 - 1e-6):
        binding = allowed.high_name
    return TwoTierOptimum(interval, k, system.efficiency(interval, k), binding)
