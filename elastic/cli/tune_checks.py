"""An answer put to the test: by the simulator, and by the user's own failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.cli.tune_answer import Answer, ReplayResult, Validation, with_findings
from elastic.cli.tune_facts import burst_window_s
from elastic.cli.tune_sources import read_log
from elastic.errors import ConfigError
from policies.domain import Finding
from policies.online import OnlinePlan
from policies.reliability import GammaRate
from policies.renewal import Weibull
from policies.replay import OnlineDriver, play, replay_efficiency, replay_optimum

if TYPE_CHECKING:
    from policies.simulate import Simulated

__all__ = ["replayed", "validated"]


def replayed(found: Answer, path: Path) -> Answer:
    """The answer with what its interval would have been worth through the failures in the log at ``path``."""
    problem = found.problem
    log = read_log("--replay", path)
    window = burst_window_s(problem.restarts_s[1])
    gaps, rest = log.gaps_s(window), log.censored_s(window)
    if not gaps:
        raise ConfigError("--replay", str(path), "it holds no gap between failures; a replay needs at least one")
    cost, restart = problem.visible_s, problem.effective_restart_s
    options = {"cost_s": cost, "restart_s": restart, "downtime_s": problem.downtime_s, "censored_s": rest}
    value = replay_efficiency(found.interval_s, gaps, **options)
    best, best_value = replay_optimum(gaps, **options)
    mean = (sum(gaps) + rest) / len(gaps)
    single = replace(problem, remote=None)
    model = single.worth(found.interval_s, 1, mean)
    # The record is of the job as a whole, which the loop sees as one node with a prior of the answer's own rate.
    prior = GammaRate.prior(1 / problem.mtbf_s)
    driver = OnlineDriver(OnlinePlan(first_stall_s=max(cost, 1e-3), prior=prior), 1)
    online = play(log.times_s(), log.duration_s, driver, cost_s=cost, restart_s=restart)
    more = []
    if abs(model - value) > 0.01:
        more.append(
            Finding(
                "W_REPLAY",
                "warn",
                f"on your failures the model is off by {100 * (model - value):+.1f} points; look at their trend",
            )
        )
    if problem.remote is not None:
        more.append(
            Finding("W_REPLAY_TIER", "warn", "the replay knows one tier: every failure restores as a node does")
        )
    result = ReplayResult(
        log=str(path),
        failures=len(gaps),
        efficiency=value,
        model=model,
        hindsight_interval_s=best,
        hindsight_efficiency=best_value,
        online_efficiency=online.efficiency,
        online_changes=driver.state.changes,
    )
    return with_findings(replace(found, replay=result), more)


def validated(found: Answer, failures: int, seed: int) -> Answer:
    """The answer with its simulation over ``failures`` failures."""
    # numpy, which only this needs, takes a good part of a second.
    from policies.simulate import exponential, simulate_single, simulate_two_tier, weibull

    problem = found.problem
    simulated: Simulated
    if problem.remote is not None:
        if problem.shares[2] <= 0:
            raise ConfigError("--validate", True, "it needs a share of domain failures above 0; see --shares")
        simulated = simulate_two_tier(problem.system(), found.interval_s, found.k, failures=failures, seed=seed)
    else:
        shape = problem.shape
        law = None if shape is None else Weibull.with_mean(problem.mtbf_s, shape)
        simulated = simulate_single(
            found.schedule_s or found.interval_s,
            stall_s=problem.local.stall_s,
            write_s=problem.local.write_s,
            slowdown=problem.local.slowdown,
            restart_s=problem.restarts_s[1],
            downtime_s=problem.downtime_s,
            lifetimes=exponential(problem.mtbf_s) if law is None else weibull(law.shape, law.scale_s),
            usable=problem.usable,
            failures=failures,
            seed=seed,
        )
    z = simulated.z(found.efficiency)
    check = Validation(simulated.efficiency, simulated.standard_error, simulated.failures, z, seed)
    more = []
    if abs(z) >= 4:
        more.append(
            Finding(
                "W_VALIDATE",
                "warn",
                f"model and simulation differ by {100 * (found.efficiency - simulated.efficiency):+.3f} points (z)",
            )
        )
    return with_findings(replace(found, validation=check), more)
