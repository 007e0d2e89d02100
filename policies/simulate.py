"""Play a job through failures, event by event, knowing none of the formulas.

Many jobs advance side by side, each by its next event (work done, stall over, write durable, restart over, failure),
so that a hundred thousand failures take seconds in numpy. What is measured is durable work over wall time; the error
comes from the spread between whole lives, which are independent: each ends with a failure that leaves nothing but
durable state behind.

The seed decides everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.two_tier import TwoTier

__all__ = ["Simulated", "exponential", "simulate_single", "simulate_two_tier", "weibull"]

_Floats = NDArray[np.float64]
_Draw = Callable[[np.random.Generator, int], _Floats]
_RESTART, _WORK, _STALL = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Simulated:
    """An efficiency found by simulation, its standard error, and from how many failures."""

    efficiency: float
    standard_error: float
    failures: int

    def z(self, predicted: float) -> float:
        """How many standard errors the prediction is above the simulation; beyond 4 one of them is wrong."""
        return (predicted - self.efficiency) / self.standard_error


def exponential(mean_s: float) -> _Draw:
    """Lifetimes without memory."""
    return lambda rng, count: rng.exponential(mean_s, count)


def weibull(shape: float, scale_s: float) -> _Draw:
    """Weibull lifetimes."""
    return lambda rng, count: scale_s * rng.weibull(shape, count)


def simulate_single(
    interval_s: float | Sequence[float],
    *,
    stall_s: float,
    write_s: float = 0.0,
    slowdown: float = 0.0,
    restart_s: float = 0.0,
    downtime_s: float = 0.0,
    lifetimes: _Draw,
    usable: float = 1.0,
    failures: int = 200_000,
    seed: int = 0,
) -> Simulated:
    """One tier. ``interval_s`` may be a schedule: the interval before the first, second, ... save of a life.

    The clock of ``lifetimes`` starts anew at each failure, once the downtime is over; restarts can be hit. A save
    that is due while another is in flight waits for it, and training goes on. ``usable`` is the probability that a
    save can be read.
    """
    rng = np.random.default_rng(seed)
    jobs = min(4000, max(100, failures // 20))
    per_job = -(-failures // jobs)
    schedule = np.atleast_1d(np.asarray(interval_s, dtype=np.float64))

    wall, durable = np.zeros(jobs), np.zeros(jobs)
    phase = np.full(jobs, _RESTART)
    left = np.full(jobs, float(restart_s))  # of a restart or stall
    since = np.zeros(jobs)  # work since the last capture
    captured = np.zeros(jobs)  # all work up to the last capture
    writing = np.full(jobs, math.inf)  # time until the write in flight is durable
    number = np.zeros(jobs, dtype=np.int64)  # captures in this life
    life = lifetimes(rng, jobs)
    lives = np.zeros(jobs, dtype=np.int64)
    done_wall, done_useful = [], []

    while wall.size:
        in_flight = writing < math.inf
        speed = np.where(in_flight, 1.0 - slowdown, 1.0)
        due = schedule[np.minimum(number, schedule.size - 1)] - since
        # A save that is due waits for the write in flight; the write's own event will wake it up.
        until = np.where(phase == _WORK, np.where((due <= 0) & in_flight, math.inf, np.maximum(due, 0) / speed), left)
        step = np.minimum(np.minimum(until, writing), life)
        fails, ends, lands = step >= life, step >= until, step >= writing

        wall += step
        life -= step
        since += np.where(phase == _WORK, step * speed, 0.0)
        left = np.where(phase == _WORK, left, left - step)
        writing -= step

        if lands.any():
            good = lands if usable >= 1 else lands & (rng.random(wall.size) < usable)
            durable[good] = captured[good]
            writing[lands] = math.inf

        ends &= ~fails
        restarted, worked, stalled = (ends & (phase == kind) for kind in (_RESTART, _WORK, _STALL))
        worked &= writing == math.inf  # one write in flight at a time
        phase[restarted] = _WORK
        phase[worked], left[worked] = _STALL, stall_s
        captured[worked] += since[worked]
        since[worked] = 0.0
        number[worked] += 1
        phase[stalled], writing[stalled] = _WORK, write_s

        if fails.any():
            count = int(fails.sum())
            wall[fails] += downtime_s
            phase[fails], left[fails] = _RESTART, restart_s
            since[fails], captured[fails], writing[fails], number[fails] = 0.0, durable[fails], math.inf, 0
            life[fails] = lifetimes(rng, count)
            lives[fails] += 1
            over = lives >= per_job
            if over.any():
                done_wall.append(wall[over])
                done_useful.append(durable[over])
                keep = ~over
                wall, durable, phase, left, since = wall[keep], durable[keep], phase[keep], left[keep], since[keep]
                captured, writing, number = captured[keep], writing[keep], number[keep]
                life, lives = life[keep], lives[keep]
    return _ratio(np.concatenate(done_useful), np.concatenate(done_wall), jobs * per_job)


def simulate_two_tier(
    system: TwoTier,
    interval_s: float,
    k: int,
    *,
    failures: int = 200_000,
    uploads_survive: bool = True,
    seed: int = 0,
) -> Simulated:
    """Two tiers under exponential failures of three classes; needs failures of class 3, which end a life.

    ``uploads_survive``: an upload in flight goes on while a failure of class 1 or 2 is repaired (its owner is not the
    rank); otherwise it is lost with it. An upload that is due while one is in flight is skipped, and training never
    waits.
    """
    model, local, remote = system.failures, system.local, system.remote
    rng = np.random.default_rng(seed)
    total = model.total_per_s
    lives_wanted = max(200, math.ceil(failures * model.domain_per_s / total))
    jobs = min(4000, lives_wanted)
    per_job = -(-lives_wanted // jobs)
    restarts = np.array([model.restart_process_s, model.restart_node_s, model.restart_domain_s])
    edges = np.array([model.process_per_s, model.process_per_s + model.node_per_s]) / total

    wall = np.zeros(jobs)
    phase = np.full(jobs, _RESTART)
    left = np.full(jobs, float(model.restart_domain_s))
    since = np.zeros(jobs)
    # Saves are numbered by the work they hold, in intervals.
    taken, in_local, in_remote = (np.zeros(jobs, dtype=np.int64) for _ in range(3))
    replicating, uploading = np.full(jobs, math.inf), np.full(jobs, math.inf)
    bare = np.full(jobs, True)  # nothing in the local tier: whatever fails now, the restore is a remote one
    upload_of = np.zeros(jobs, dtype=np.int64)
    life = rng.exponential(1 / total, jobs)
    lives = np.zeros(jobs, dtype=np.int64)
    seen = 0
    done_wall, done_useful = [], []

    while wall.size:
        copying, sending = replicating < math.inf, uploading < math.inf
        speed = 1.0 - local.slowdown * copying - remote.slowdown * sending
        due = np.maximum(interval_s - since, 0.0)
        until = np.where(phase == _WORK, np.where((due <= 0) & copying, math.inf, due / speed), left)
        step = np.minimum(np.minimum(until, life), np.minimum(replicating, uploading))
        fails, ends, copied, sent = step >= life, step >= until, step >= replicating, step >= uploading

        wall += step
        life -= step
        since += np.where(phase == _WORK, step * speed, 0.0)
        left = np.where(phase == _WORK, left, left - step)
        replicating -= step
        uploading -= step

        in_local[copied] = taken[copied]
        replicating[copied] = math.inf
        in_remote[sent] = upload_of[sent]
        uploading[sent] = math.inf

        ends &= ~fails
        restarted, worked, stalled = (ends & (phase == kind) for kind in (_RESTART, _WORK, _STALL))
        worked &= replicating == math.inf  # one replication in flight at a time
        phase[restarted], bare[restarted] = _WORK, False
        taken[worked] += 1
        since[worked] = 0.0
        also_remote = worked & (taken % k == 0) & ~(uploading < math.inf)
        phase[worked] = _STALL
        left[worked] = local.stall_s
        left[also_remote] += remote.stall_s
        upload_of[also_remote] = -taken[also_remote]  # negative until the stall is over
        phase[stalled], replicating[stalled] = _WORK, local.write_s
        started = stalled & (upload_of < 0)
        upload_of[started] = -upload_of[started]
        uploading[started] = remote.write_s

        if fails.any():
            count = int(fails.sum())
            seen += count
            kind = np.searchsorted(edges, rng.random(count), side="right")
            wall[fails] += model.downtime_s
            hit = np.flatnonzero(fails)
            domain = hit[kind == 2]
            bare[domain] = True
            phase[fails], left[fails] = _RESTART, np.where(bare[hit], model.restart_domain_s, restarts[kind])
            since[fails], replicating[fails] = 0.0, math.inf
            life[fails] = rng.exponential(1 / total, count)
            in_local[domain] = in_remote[domain]
            # What was captured and is not in the local tier is gone, and with it an upload that reads it.
            orphaned = hit[(upload_of[hit] < 0) | (upload_of[hit] > in_local[hit])]
            lost = np.union1d(orphaned, domain if uploads_survive else hit)
            uploading[lost] = math.inf
            upload_of[lost] = 0
            taken[fails] = in_local[fails]
            lives[domain] += 1
            over = lives >= per_job
            if over.any():
                done_wall.append(wall[over])
                done_useful.append(in_remote[over] * interval_s)
                keep = ~over
                wall, phase, left, since = wall[keep], phase[keep], left[keep], since[keep]
                taken, in_local, in_remote = taken[keep], in_local[keep], in_remote[keep]
                replicating, uploading, upload_of = replicating[keep], uploading[keep], upload_of[keep]
                bare, life, lives = bare[keep], life[keep], lives[keep]
    return _ratio(np.concatenate(done_useful), np.concatenate(done_wall), seen)


def _ratio(useful: _Floats, wall: _Floats, failures: int) -> Simulated:
    """The ratio of two sums over independent jobs with its standard error by the delta method."""
    value = float(useful.sum() / wall.sum())
    residual = useful - value * wall
    error = math.sqrt(float((residual**2).sum()) / (useful.size * (useful.size - 1))) / float(wall.mean())
    return Simulated(value, error, failures)
