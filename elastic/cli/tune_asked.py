"""The options of ``elastic tune`` as typed, and how they become a problem to solve."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.cli.tune_answer import Answer, answer, scale, with_findings
from elastic.cli.tune_facts import (
    Rate,
    RunFacts,
    burst_window_s,
    log_findings,
    rate_from_counts,
    rate_from_preset,
    read_run_facts,
)
from elastic.cli.tune_problem import Problem
from elastic.cli.tune_units import duration, implausible, node_counts, rate_bytes_per_s, share, size_bytes
from elastic.errors import ConfigError
from policies.constraints import Limits
from policies.diagnostics import weibull_fit
from policies.domain import Finding, PolicyError
from policies.failure_log import FailureLog, read_failure_log
from policies.fleet import FleetRate
from policies.preemption import final_save, unnoticed_mtbf_s
from policies.presets import preset, spot_notice
from policies.reliability import DEFAULT_SHARES
from policies.two_tier import Tier

__all__ = ["Asked", "read_log"]


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
        facts = _journal_facts(self.run, self.storage) if self.run is not None else None
        local = self._local_tier(facts)
        remote = self._remote_tier(facts)
        restarts = self._restarts(facts, remote is not None)
        counts = node_counts("--nodes", self.nodes) if self.nodes is not None else ()
        log = read_log("--log", self.log) if self.log is not None else None
        rate = self._rate(counts, log, facts, restarts[1])
        noticed = share("--noticed-share", self.noticed_share)
        problem = Problem(
            mtbf_s=unnoticed_mtbf_s(rate.mtbf_s, noticed),
            local=local,
            remote=remote,
            restarts_s=restarts,
            shares=self._shares(facts, log, restarts[1]),
            downtime_s=duration("--downtime", self.downtime),
            policy=self._policy(log, restarts[1]),
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
            findings=[*doubts, *record],
        )
        found = self._with_notice(found)
        if len(counts) > 1:
            found = replace(found, scale=scale(problem, self._fleet_rate(rate, counts, noticed), counts))
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

    def _rate(self, counts: tuple[int, ...], log: FailureLog | None, facts: RunFacts | None, restart_s: float) -> Rate:
        given = {
            "--mtbf": self.mtbf is not None,
            "--failures": self.failures is not None,
            "--log": self.log is not None,
            "--preset": self.preset_name is not None,
        }
        named = [name for name, is_given in given.items() if is_given]
        if len(named) > 1:
            raise ConfigError(named[1], "given", f"{named[0]} says the failure rate already; give one of them")
        if self.measured_nodes is not None and self.measured_nodes < 1:
            raise ConfigError("--measured-nodes", self.measured_nodes, "give a whole number of at least 1")
        nodes = counts[0] if counts else None
        rate: Rate
        if self.mtbf is not None:
            value = duration("--mtbf", self.mtbf, zero=False)
            measured = self.measured_nodes or (nodes if len(counts) == 1 else None)
            scaled = value * self.measured_nodes / nodes if self.measured_nodes and nodes else value
            rate = Rate(scaled, "as given", None if measured is None else 1 / (value * measured))
        elif self.failures is not None:
            if self.failures < 0:
                raise ConfigError("--failures", self.failures, "it must not be negative")
            if self.hours is None or not 0 < self.hours < float("inf"):
                raise ConfigError("--hours", self.hours, "say in how many hours of running the failures were seen")
            rate = self._counted(
                self.failures, self.hours * 3600, counts, f"{self.failures} failures in {self.hours:g} h"
            )
        elif log is not None:
            window = burst_window_s(restart_s)
            count = log.count(window)
            source = f"{count} failures in {log.duration_s / 3600:.4g} h of {self.log}"
            if len(log.failures) > count + log.starts_with_failure:
                source += f" ({len(log.failures)} lines; those within {window:.0f} s of another count once)"
            rate = self._counted(count, log.duration_s, counts, source)
        elif self.preset_name is not None:
            fleet = preset(self.preset_name)
            size = nodes or fleet.nodes
            if size is None:
                raise PolicyError(
                    "E_MISSING", f"--nodes is missing: preset {fleet.name} is a rate per node; say for how many"
                )
            rate = rate_from_preset(fleet, size)
        elif facts is not None and facts.exposure_node_s > 0:
            rate = self._from_journal(facts, nodes)
        else:
            raise PolicyError(
                "E_MISSING",
                "--mtbf is missing: say how often it fails, or give --failures and --hours, --log, --preset or --run",
            )
        return self._with_common(rate)

    def _from_journal(self, facts: RunFacts, nodes: int | None) -> Rate:
        size = nodes or facts.nodes
        if size is None:
            raise PolicyError(
                "E_MISSING", "--nodes is missing: say for how many nodes; the journal gives the rate per node"
            )
        failures = sum(facts.failures.values())
        source = f"run {self.run}: {failures} failures in {facts.exposure_node_s / 3600:.4g} node-hours"
        return rate_from_counts(
            failures, facts.exposure_node_s, nodes=size, measured_nodes=1, prior=self.prior, source=source
        )

    def _counted(self, failures: int, exposure_s: float, counts: tuple[int, ...], source: str) -> Rate:
        nodes = counts[0] if counts else None
        if len(counts) > 1 and self.measured_nodes is None:
            raise PolicyError("E_MISSING", "--measured-nodes is missing: say on how many nodes the failures were seen")
        return rate_from_counts(
            failures, exposure_s, nodes=nodes, measured_nodes=self.measured_nodes, prior=self.prior, source=source
        )

    def _with_common(self, rate: Rate) -> Rate:
        if self.common_mtbf is None:
            return rate
        common = 1 / duration("--common-mtbf", self.common_mtbf, zero=False)

        def joined(mtbf_s: float | None) -> float | None:
            return None if mtbf_s is None else 1 / (1 / mtbf_s + common)

        return replace(
            rate,
            mtbf_s=1 / (1 / rate.mtbf_s + common),
            low_s=joined(rate.low_s),
            high_s=joined(rate.high_s),
            source=f"{rate.source}, and one failure every {self.common_mtbf} of what all nodes share",
        )

    def _fleet_rate(self, rate: Rate, counts: tuple[int, ...], noticed: float) -> FleetRate:
        if rate.per_node_s is None:
            raise PolicyError(
                "E_MISSING", "--measured-nodes is missing: say on how many nodes the MTBF holds, to scale from there"
            )
        common = 0.0 if self.common_mtbf is None else 1 / duration("--common-mtbf", self.common_mtbf, zero=False)
        return FleetRate(rate.per_node_s * (1 - noticed), common * (1 - noticed))

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

    def _policy(self, log: FailureLog | None, restart_s: float) -> str:
        if self.policy == "trace" and log is None:
            raise ConfigError("--policy", "trace", "it needs your own failures: give --log")
        if self.policy == "lazy":
            self._shape(log, restart_s)
        return "exact" if self.policy in ("auto", "two-tier") and self.remote_write is None else self.policy

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
        upload = None if remote is None else local.stall_s + remote.stall_s + remote.write_s
        decided = final_save(seconds, peer_save_p95_s=peer, remote_save_p95_s=upload)
        more = []
        if offer is not None:
            more.append(Finding("W_SPOT", "warn", f"{offer.name}: {offer.caveat}"))
        if decided.target == "none" and self.noticed_share > 0:
            more.append(Finding("W_NOTICE", "warn", "no save fits into the notice: set --noticed-share 0, these count"))
        return with_findings(replace(found, final_save=decided), more)


def _maybe(field: str, text: str | None, *, zero: bool = True) -> float | None:
    return None if text is None else duration(field, text, zero=zero)


def read_log(field: str, path: Path) -> FailureLog:
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return read_failure_log(lines, str(path))
    except OSError as problem:
        raise ConfigError(field, str(path), f"it cannot be read ({problem.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(field, str(path), "it is not text in UTF-8; export it as CSV") from None
    except csv.Error as problem:
        raise ConfigError(field, str(path), f"it is not CSV ({problem})") from None


def _journal_facts(run: str, storage: str | None) -> RunFacts:
    """The facts in the journal of ``run`` under ``storage``."""
    from elastic import journal
    from elastic.storage.blob_store import open_store

    if storage is None:
        raise PolicyError("E_MISSING", f"--storage is missing: say where run {run} is stored: a path or URL")
    store = open_store(storage)
    keys = sorted(key for key in store.list(f"{run}/{journal.PREFIX}") if key.endswith(".jsonl"))
    if not keys:
        raise ConfigError("--run", run, f"there is no journal at {storage}/{run}/{journal.PREFIX}")

    def records() -> Iterator[dict[str, Any]]:
        for key in keys:
            yield from journal.decode(store.get(key), key)

    return read_run_facts(records())
