"""Run an interval, or a policy that changes it, through failures that really happened.

Two ways: ``replay_efficiency`` takes the gaps between failures as lives and counts the saves that fit in each, which
is the renewal formula with the empirical survival function; ``play`` walks through a record from its first second to
its last and asks a driver for the interval, so that a policy can learn as it goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from policies.online import Decision, Failed, OnlineInterval, OnlinePlan, Restored, Running, Saved, begin, step
from policies.single_tier import exact

__all__ = [
    "Driver",
    "FixedDriver",
    "OnlineDriver",
    "Played",
    "best_static",
    "play",
    "replay_efficiency",
    "replay_optimum",
]


def replay_efficiency(
    interval_s: float,
    gaps_s: Sequence[float],
    *,
    cost_s: float,
    restart_s: float = 0.0,
    downtime_s: float = 0.0,
    censored_s: float = 0.0,
) -> float:
    """Useful over wall time had the job saved every ``interval_s`` of work through lives of ``gaps_s``.

    ``restart_s`` is effective (with ``(1-s)L``). ``censored_s`` is a last life that had not ended; it counts with its
    saves.
    """
    period = interval_s + cost_s
    lives = [*gaps_s, censored_s] if censored_s > 0 else list(gaps_s)
    saves = sum(math.floor(max(0.0, life - restart_s) / period) for life in lives)
    return interval_s * saves / (sum(lives) + downtime_s * len(gaps_s))


def replay_optimum(
    gaps_s: Sequence[float],
    *,
    cost_s: float,
    restart_s: float = 0.0,
    downtime_s: float = 0.0,
    censored_s: float = 0.0,
) -> tuple[float, float]:
    """(interval, efficiency) of the best fixed interval in hindsight, on a 2 % grid around the exact one."""
    mean = (sum(gaps_s) + censored_s) / max(len(gaps_s), 1)
    near = exact(cost_s, mean)
    grid = [near * 1.02**power for power in range(-105, 106)]

    def worth(interval: float) -> float:
        return replay_efficiency(
            interval, gaps_s, cost_s=cost_s, restart_s=restart_s, downtime_s=downtime_s, censored_s=censored_s
        )

    best = max(grid, key=worth)
    return best, worth(best)


class Driver(Protocol):
    """What decides the interval while a record is played."""

    def interval_s(self) -> float: ...
    def saved(self, t: float, stall_s: float) -> None: ...
    def failed(self, t: float) -> None: ...
    def restored(self, t: float, seconds: float) -> None: ...
    def ran(self, t: float, seconds: float) -> None: ...


@dataclass(slots=True)
class FixedDriver:
    """The same interval always."""

    interval: float

    def interval_s(self) -> float:
        return self.interval

    def saved(self, t: float, stall_s: float) -> None: ...
    def failed(self, t: float) -> None: ...
    def restored(self, t: float, seconds: float) -> None: ...
    def ran(self, t: float, seconds: float) -> None: ...


class OnlineDriver:
    """The online loop, fed with what the record shows; ``decisions`` keeps every change."""

    def __init__(self, plan: OnlinePlan, nodes: int) -> None:
        self.nodes = nodes
        self.state: OnlineInterval
        self.state, first = begin(plan, nodes=nodes)
        self.decisions: list[tuple[float, Decision]] = [(0.0, first)]

    def interval_s(self) -> float:
        return self.state.interval_s

    def saved(self, t: float, stall_s: float) -> None:
        self._step(Saved(t, stall_s))

    def failed(self, t: float) -> None:
        self._step(Failed(t, "node"))

    def restored(self, t: float, seconds: float) -> None:
        self._step(Restored(t, seconds, "node"))

    def ran(self, t: float, seconds: float) -> None:
        self._step(Running(t, seconds * self.nodes))

    def _step(self, observation: Saved | Failed | Restored | Running) -> None:
        self.state, decision = step(self.state, observation)
        if decision.changed:
            self.decisions.append((observation.t, decision))


@dataclass(frozen=True, slots=True)
class Played:
    """The outcome of a record: durable work over its length, saves taken, failures met."""

    efficiency: float
    saves: int
    failures: int


def play(
    failure_times_s: Sequence[float], duration_s: float, driver: Driver, *, cost_s: float, restart_s: float = 0.0
) -> Played:
    """Walk a blocking job through sorted ``failure_times_s`` until ``duration_s``, asking ``driver`` before each save.

    A failure undoes the work since the last save and starts a restart, which another failure may hit. Work that no save
    holds at the end is not counted.
    """
    now = useful = 0.0
    saves = failures = 0
    index = 0
    times = [*failure_times_s, math.inf]
    restarting = False
    began = 0.0
    while now < duration_s:
        next_failure = times[index]
        length = restart_s if restarting else driver.interval_s() + cost_s
        interval = length - cost_s
        end = now + length
        if next_failure <= min(end, duration_s):
            if not restarting:
                driver.ran(next_failure, next_failure - now)
                began = next_failure
            now, restarting = next_failure, True
            failures += 1
            index += 1
            driver.failed(now)
            continue
        if end > duration_s:
            break
        now = end
        if restarting:
            restarting = False
            driver.restored(now, now - began)
        else:
            useful += interval
            saves += 1
            driver.ran(now, length)
            driver.saved(now, cost_s)
    return Played(useful / duration_s, saves, failures)


def best_static(
    failure_times_s: Sequence[float], duration_s: float, *, cost_s: float, restart_s: float = 0.0
) -> tuple[float, float]:
    """(interval, efficiency) of the best fixed interval in hindsight when the whole record is played."""
    near = exact(cost_s, duration_s / max(len(failure_times_s), 1))

    def worth(interval: float) -> float:
        return play(failure_times_s, duration_s, FixedDriver(interval), cost_s=cost_s, restart_s=restart_s).efficiency

    best = max((near * 1.05**power for power in range(-30, 31)), key=worth)
    return best, worth(best)
