"""The options of ``elastic tune`` as typed, and how they become a problem to solve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from elastic.cli.tune_answer import Answer, answer, scale, with_findings
from elastic.cli.tune_facts import (
    RunFacts,
    burst_window_s,
    log_findings,
)
from elastic.cli.tune_problem import Problem
from elastic.cli.tune_sources import fleet_rate, job_rate, journal_facts, read_log
from elastic.cli.tune_units import duration, implausible, node_counts, rate_bytes_per_s, share, size_bytes
from elastic.errors import ConfigError
from policies.constraints import Limits
from policies.diagnostics import weibull_fit
from policies.domain import Finding, PolicyError
from policies.failure_log import FailureLog
from policies.preemption import final_save, unnoticed_mtbf_s
from policies.presets import spot_notice
from policies.reliability import DEFAULT_SHARES
from policies.two_tier import Tier

__all__ = ["Asked"]


@dataclass(frozen=True, slots=True)
class Asked:
    """The options as typed. ``solve`` resolves them in the order in which one needs the other."""

    mtbf: str | None
    failures: int | None
    hours: float | None
    nodes: str | None
    measured_nodes: int | None
    log: Path | None
    preset_name: str | None
    run: str | None
    storage: str | None
    common_mtbf: str | None
    prior: bool
    cost: str | None
    stall: str | None
    write: str | None
    slowdown: float
    size: str | None
    bandwidth: str | None
    usable: float
    restart: str | None
    restart_process: str | None
    restart_remote: str | None
    downtime: str
    remote_stall: str | None
    remote_write: str | None
    remote_slowdown: float
    remote_bandwidth: str | None
    shares: str | None
    k: int | None
    policy: str
    shape: float | None
    rpo: str | None
    rpo_remote: str | None
    budget: float | None
    min_interval: str | None
    max_interval: str | None
    write_p95: str | None
    remote_write_p95: str | None
    upload_limit: str | None
    step_time: str | None
    work: str | None
    spot: str | None
    notice: str | None
    noticed_share: float

    def solve(self) -> Answer:
        """The whole answer."""
        facts = journal_facts(self.run, self.storage) if self.run is not None else None
        local = self._local_tier(facts)
        remote = self._remote_tier(facts)
        restarts = self._restarts(facts, remote is not None)
        counts = node_counts("--nodes", self.nodes) if self.nodes is not None else ()
        log = read_log("--log", self.log) if self.log is not None else None
        rate = job_rate(self, counts, log, facts, restarts[1])
        noticed = share("--noticed-share", self.noticed_share)
        problem = Problem(
            mtbf_s=unnoticed_mtbf_s(rate.mtbf_s, noticed),
            local=local,
            remote=remote,
            restarts_s=restarts,
            shares=self._shares(facts, log, restarts[1]),
            downtime_s=duration("--downtime", self.downtime),
            policy=self._policy(log, remote is not None),
            limits=self._limits(local, facts),
            remote_limits=self._remote_limits(facts),
            fixed_k=self._fixed_k(remote),
            usable=share("--usable", self.usable, one=True),
            shape=self._shape(log, restarts[1]),
            gaps_s=tuple(log.gaps_s(burst_window_s(restarts[1]))) if log is not None else (),
        )
        if noticed:
            kept = 1 / (1 - noticed)
            rate = replace(
                rate,
                mtbf_s=rate.mtbf_s * kept,
                low_s=rate.low_s and rate.low_s * kept,
                high_s=rate.high_s and rate.high_s * kept,
                source=f"{rate.source}; without the {noticed:.0%} that announce themselves",
            )
        step = _maybe("--step-time", self.step_time, zero=False)
        doubts = implausible(
            mtbf_s=rate.mtbf_s if self.mtbf is not None else None,
            visible_s=local.visible_s,
            restart_s=restarts[1],
            step_time_s=step,
        )
        record = log_findings(log, burst_window_s(restarts[1]), counts[0] if counts else None) if log else ()
        found = answer(
            problem,
            rate,
            step_time_s=step,
            work_s=_maybe("--work", self.work, zero=False),
            findings=[*doubts, *record, *self._model_doubts(problem, facts, log)],
        )
        found = self._with_notice(found)
        if len(counts) > 1:
            found = replace(found, scale=scale(problem, fleet_rate(self, rate, counts, noticed), counts))
        return found

    def _model_doubts(self, problem: Problem, facts: RunFacts | None, log: FailureLog | None) -> list[Finding]:
        """What the answer takes for granted and nobody has measured."""
        found = []
        if problem.remote is not None and self.shares is None and facts is None and log is None:
            found.append(
                Finding(
                    "W_SHARES",
                    "warn",
                    f"that {problem.shares[2]:.0%} of the failures need the remote tier is a guess from other logs; "
                    "it sets the remote period, see --shares",
                )
            )
        for tier, limits, name in (
            (problem.local, problem.limits, "write"),
            (problem.remote, problem.remote_limits, "upload"),
        ):
            if tier is not None and limits.write_p95_s is not None and limits.write_p95_s > 2 * tier.write_s > 0:
                found.append(
                    Finding(
                        "W_WRITE_TAIL",
                        "warn",
                        f"the {name}'s p95 of {limits.write_p95_s:g} s is more than twice its mean of "
                        f"{tier.write_s:g} s: storage is uneven",
                    )
                )
        return found

    def _local_tier(self, facts: RunFacts | None) -> Tier:
        slow = share("--slowdown", self.slowdown)
        if self.bandwidth is not None and self.size is None:
            raise ConfigError("--bandwidth", self.bandwidth, "give --bytes too; the time is bytes over bandwidth")
        transfer = None
        if self.bandwidth is not None and self.size is not None:
            transfer = size_bytes("--bytes", self.size) / rate_bytes_per_s("--bandwidth", self.bandwidth)
        write = _maybe("--write", self.write)
        stall = _maybe("--stall", self.stall)
        if self.cost is not None:
            if stall is not None:
                raise ConfigError("--cost", self.cost, "give --cost (all that a save costs) or --stall, not both")
            visible = duration("--cost", self.cost)
            length = write if write is not None else (transfer or 0.0)
            if slow * length > visible:
                raise ConfigError(
                    "--cost",
                    self.cost,
                    f"a slowdown of {slow:g} during {length:g} s alone costs {slow * length:g} s; "
                    "--cost is the whole visible cost, give --stall for the stall alone",
                )
            return Tier(visible - slow * length, length, slow)
        if stall is not None or write is not None:
            return Tier(stall or 0.0, write if write is not None else (transfer or 0.0), slow)
        if transfer is not None:
            return Tier(transfer)
        if facts is not None and facts.stall_s is not None:
            return Tier(facts.stall_s, facts.write_s or 0.0, slow)
        raise PolicyError(
            "E_MISSING",
            "--cost is missing: say what a save costs: --cost; --stall and --write; or --bytes and --bandwidth",
        )

    def _remote_tier(self, facts: RunFacts | None) -> Tier | None:
        slow = share("--remote-slowdown", self.remote_slowdown)
        length = _maybe("--remote-write", self.remote_write)
        if length is None and self.remote_bandwidth is not None:
            if self.size is None:
                raise ConfigError("--remote-bandwidth", self.remote_bandwidth, "give --bytes too")
            length = size_bytes("--bytes", self.size) / rate_bytes_per_s("--remote-bandwidth", self.remote_bandwidth)
        stall = _maybe("--remote-stall", self.remote_stall)
        if length is None and stall is None:
            if facts is not None and facts.upload_s is not None:
                return Tier(0.0, self._throttled(facts.upload_s), slow)
            if self.policy == "two-tier":
                raise ConfigError("--policy", "two-tier", "describe the remote tier: --remote-write or --remote-stall")
            return None
        return Tier(stall or 0.0, self._throttled(length or 0.0), slow)

    def _throttled(self, upload_s: float) -> float:
        """An upload that may not use more than --upload-limit takes longer."""
        limit = self._limit_period_s()
        return upload_s if limit is None else max(upload_s, limit)

    def _limit_period_s(self) -> float | None:
        if self.upload_limit is None:
            return None
        if self.size is None:
            raise ConfigError("--upload-limit", self.upload_limit, "give --bytes too")
        return size_bytes("--bytes", self.size) / rate_bytes_per_s("--upload-limit", self.upload_limit)

    def _restarts(self, facts: RunFacts | None, two: bool) -> tuple[float, float, float]:
        measured = dict(facts.restores_s) if facts is not None else {}
        restart = _maybe("--restart", self.restart)
        node = restart if restart is not None else measured.get("node", measured.get("process", 0.0))
        process = _maybe("--restart-process", self.restart_process)
        remote = _maybe("--restart-remote", self.restart_remote)
        if not two:
            return node, node, node
        return (
            process if process is not None else (node if restart is not None else measured.get("process", node)),
            node,
            remote if remote is not None else (node if restart is not None else measured.get("domain", node)),
        )

    def _shares(self, facts: RunFacts | None, log: FailureLog | None, restart_s: float) -> tuple[float, float, float]:
        if self.shares is not None:
            try:
                parts = [float(part) for part in self.shares.split(",")]
            except ValueError:
                parts = []
            if len(parts) != 3 or any(not 0 <= part <= 1 for part in parts) or abs(sum(parts) - 1) > 1e-6:
                raise ConfigError("--shares", self.shares, "give three shares that add up to 1, like 0.2,0.77,0.03")
            return parts[0], parts[1], parts[2]
        if facts is not None:
            return facts.shares
        if log is not None:
            counts = {name: float(n) for name, n in log.by_class(burst_window_s(restart_s)).items()}
            return DEFAULT_SHARES.observe_counts(counts).mean
        return DEFAULT_SHARES.mean

    def _policy(self, log: FailureLog | None, two: bool) -> str:
        if two:
            one_tier_only = {
                "--usable": self.usable != 1,
                "--shape": self.shape is not None,
                "--work": self.work is not None,
                f"--policy {self.policy}": self.policy in ("lazy", "trace"),
            }
            for name, is_given in one_tier_only.items():
                if is_given:
                    raise ConfigError(name, "given", "its model knows one tier; leave it or the remote tier out")
            return "two-tier" if self.policy in ("auto", "exact") else self.policy
        if self.policy == "trace" and log is None:
            raise ConfigError("--policy", "trace", "it needs your own failures: give --log")
        return "exact" if self.policy == "auto" else self.policy

    def _shape(self, log: FailureLog | None, restart_s: float) -> float | None:
        if self.shape is not None:
            if not 0.2 <= self.shape <= 10:
                raise ConfigError("--shape", self.shape, "a Weibull shape between 0.2 and 10 is expected")
            return self.shape
        if self.policy != "lazy":
            return None
        if log is None:
            raise ConfigError("--policy", "lazy", "it needs the shape of the failures: give --shape, or --log")
        window = burst_window_s(restart_s)
        gaps = [gap for gap in log.gaps_s(window) if gap > 0]
        fit = weibull_fit(gaps, [log.censored_s(window)] if log.censored_s(window) > 0 else [])
        if fit.failures < 50 or fit.shape_high >= 0.8:
            raise ConfigError(
                "--policy",
                "lazy",
                f"the log does not bear it out: shape {fit.shape:.2f}, at most {fit.shape_high:.2f}, {fit.failures} "
                "failures; it takes 50 failures and a shape surely below 0.8",
            )
        return fit.shape

    def _limits(self, local: Tier, facts: RunFacts | None) -> Limits:
        throttle = self._limit_period_s() if self.remote_write is None and self.remote_bandwidth is None else None
        p95 = _maybe("--write-p95", self.write_p95)
        if p95 is None and facts is not None and self.write is None:
            p95 = facts.write_p95_s
        least = _maybe("--min", self.min_interval)
        most = _maybe("--max", self.max_interval, zero=False)
        if least is not None and most is not None and least > most:
            raise ConfigError("--min", self.min_interval, f"it is above --max {self.max_interval}")
        return Limits(
            write_p95_s=p95,
            throttle_period_s=throttle,
            rpo_s=_maybe("--rpo", self.rpo, zero=False),
            budget=None if self.budget is None else share("--budget", self.budget, one=True),
            min_s=least,
            max_s=most,
        )

    def _remote_limits(self, facts: RunFacts | None) -> Limits:
        p95 = _maybe("--remote-write-p95", self.remote_write_p95)
        if p95 is None and facts is not None and self.remote_write is None:
            p95 = facts.upload_p95_s
        return Limits(
            write_p95_s=p95,
            throttle_period_s=self._limit_period_s(),
            rpo_s=_maybe("--rpo-remote", self.rpo_remote, zero=False),
        )

    def _fixed_k(self, remote: Tier | None) -> int | None:
        if self.k is None:
            return None
        if self.k < 1:
            raise ConfigError("--k", self.k, "it counts saves, from 1")
        if remote is None:
            raise ConfigError("--k", self.k, "there is no remote tier; describe it with --remote-write")
        return self.k

    def _with_notice(self, found: Answer) -> Answer:
        if self.spot is None and self.notice is None:
            return found
        offer = spot_notice(self.spot) if self.spot is not None else None
        length = _maybe("--notice", self.notice, zero=False)
        seconds = length if length is not None else (offer.notice_s if offer is not None else 0.0)
        local, remote = found.problem.local, found.problem.remote
        p95 = found.problem.limits.write_p95_s
        peer = local.stall_s + (p95 if p95 is not None else local.write_s)
        upload = None
        if remote is not None:
            upload = local.stall_s + remote.stall_s + (found.problem.remote_limits.write_p95_s or remote.write_s)
        decided = final_save(seconds, peer_save_p95_s=peer, remote_save_p95_s=upload)
        more = []
        if offer is not None:
            more.append(Finding("W_SPOT", "warn", f"{offer.name}: {offer.caveat}"))
        if decided.target == "none" and self.noticed_share > 0:
            more.append(Finding("W_NOTICE", "warn", "no save fits into the notice: set --noticed-share 0, these count"))
        return with_findings(replace(found, final_save=decided), more)


def _maybe(field: str, text: str | None, *, zero: bool = True) -> float | None:
    return None if text is None else duration(field, text, zero=zero)
