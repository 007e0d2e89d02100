"""Where the failure rate and the costs come from: what the user typed, a log, a preset, or a run's own journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastic.errors import ConfigError
from policies.diagnostics import burst_share, lemon_nodes, squared_variation, trend, weibull_fit
from policies.domain import Finding, PolicyError
from policies.failure_log import FailureLog
from policies.presets import Preset
from policies.reliability import (
    DEFAULT_PRIOR,
    DEFAULT_SHARES,
    GammaRate,
    rate_interval,
    rate_upper_bound_without_failures,
)

__all__ = [
    "Rate",
    "RunFacts",
    "burst_window_s",
    "log_findings",
    "rate_from_counts",
    "rate_from_preset",
    "read_run_facts",
]

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Rate:
    """The MTBF of the job with its confidence interval, and in words what it rests on.

    ``low_s`` and ``high_s`` are None where an MTBF was simply given. ``per_node_s`` is the rate per node-second, None
    where the node count is not known; then it cannot be scaled.
    """

    mtbf_s: float
    source: str
    per_node_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    failures: float | None = None
    exposure_node_s: float | None = None
    prior: str | None = None
    findings: tuple[Finding, ...] = ()


def burst_window_s(restart_s: float) -> float:
    """Failures of a job closer than this are one episode: ``max(60 s, 2 R)``."""
    return max(60.0, 2 * restart_s)


def rate_from_counts(
    failures: int, exposure_s: float, *, nodes: int | None, measured_nodes: int | None, prior: bool, source: str
) -> Rate:
    """The rate from ``failures`` in ``exposure_s`` of running on ``measured_nodes`` nodes, for a job on ``nodes``.

    With a node count a weak prior (worth one failure, 6.5 per 1000 node-days) is part of it, so that no failure is an
    answer too. Without one, or with ``prior=False``, it is the count over the time with its exact interval.
    """
    findings: list[Finding] = []
    if failures < 3:
        findings.append(
            Finding("W_FEW_FAILURES", "warn", f"only {failures} failures were seen: see the confidence interval")
        )
    measured = measured_nodes or nodes
    if measured is not None and prior:
        exposure = exposure_s * measured
        belief = DEFAULT_PRIOR.observe(failures, exposure)
        job = nodes or measured
        low, high = belief.mtbf_interval_s(job)
        return Rate(
            belief.mtbf_s(job),
            source,
            belief.rate_per_node_s,
            low,
            high,
            failures,
            exposure,
            "worth one failure at 6.5 per 1000 node-days (Meta RSC-1)",
            tuple(findings),
        )
    if measured is None and prior and failures == 0:
        raise PolicyError(
            "E_MISSING",
            "--nodes is missing: no failure was seen; give the number of nodes, so that a prior can be used",
        )
    belief = GammaRate(failures + 0.5, exposure_s) if failures == 0 else GammaRate(failures, exposure_s)
    exact = rate_interval(failures, exposure_s)
    scale = 1.0 if nodes is None or measured is None else nodes / measured
    low_rate = exact.low
    high_rate = exact.high if failures else rate_upper_bound_without_failures(exposure_s)
    return Rate(
        1 / (belief.rate_per_node_s * scale),
        source,
        None if measured is None else belief.rate_per_node_s / measured,
        1 / (high_rate * scale),
        1 / (low_rate * scale) if low_rate > 0 else float("inf"),
        failures,
        exposure_s * (measured or 1),
        "Jeffreys, half a failure" if failures == 0 else None,
        tuple(findings),
    )


def rate_from_preset(preset: Preset, nodes: int) -> Rate:
    """The published rate scaled to ``nodes`` nodes; with its exact interval where the count was published."""
    low = high = None
    if preset.failures is not None and preset.node_days is not None:
        estimate = rate_interval(preset.failures, preset.node_days * 24 * _HOUR_S)
        low, high = 1 / (estimate.high * nodes), 1 / (estimate.low * nodes)
    return Rate(
        preset.mtbf_s(nodes),
        f"preset {preset.name}: {preset.per_1000_node_days:.3g} failures per 1000 node-days ({preset.source})",
        preset.rate_per_node_s,
        low,
        high,
        preset.failures,
        None if preset.node_days is None else preset.node_days * 24 * _HOUR_S,
        None,
        (
            Finding(
                "W_PRESET",
                "warn",
                f"the failure rate is that of {preset.title}, not yours ({preset.caveat}); measure your own",
            ),
        ),
    )


def log_findings(log: FailureLog, window_s: float, nodes: int | None) -> tuple[Finding, ...]:
    """What the record shows beside its rate: trend, spread, bursts, shape, lemon nodes. Warnings only."""
    found = list(log.findings)
    times, gaps = log.episodes_s(window_s), [gap for gap in log.gaps_s(window_s) if gap > 0]
    inner = times[1:] if log.starts_with_failure else times
    if len(inner) >= 4:
        # A record that ends with a failure is tested up to the one before, as the test for a truncated record needs.
        tested = trend(inner[:-1], inner[-1]) if log.ends_with_failure else trend(inner, log.duration_s)
        if abs(tested.u) > 1.96:
            way = "more and more" if tested.u > 0 else "fewer and fewer"
            found.append(
                Finding(
                    "W_TREND",
                    "warn",
                    f"failures become {way} frequent (Laplace U = {tested.u:+.2f}, p = {tested.p:.2g}): "
                    "use the recent part of the log",
                )
            )
    if len(gaps) >= 10:
        spread = squared_variation(gaps)
        if spread > 2:
            found.append(Finding("W_DISPERSION", "warn", f"gaps vary {spread:.1f} times as much as by chance"))
        fit = weibull_fit(gaps, [log.censored_s(window_s)] if log.censored_s(window_s) > 0 else [])
        if fit.shape_high < 1 or fit.shape_low > 1:
            found.append(
                Finding(
                    "W_SHAPE",
                    "warn",
                    f"the gaps are not exponential: Weibull shape {fit.shape:.2f} "
                    f"({fit.shape_low:.2f} to {fit.shape_high:.2f}); below 1 the answer is on the safe side",
                )
            )
    raw = log.times_s()
    if len(raw) >= 10:
        share = burst_share(raw, window_s)
        mean = log.duration_s / max(1, log.count(window_s))
        if share > 2 * window_s / (mean + window_s):
            found.append(
                Finding(
                    "W_BURSTS",
                    "warn",
                    f"{share:.0%} of the failures follow within {window_s:.0f} s of another; such a storm counts once",
                )
            )
    by_node = log.by_node()
    if by_node:
        fleet = max(nodes or 0, len(by_node))
        found.extend(
            Finding(
                "W_LEMON",
                "warn",
                f"node {lemon.node} failed {lemon.failures} times, {lemon.times_fleet:.0f} times its share "
                f"(p = {lemon.p:.1g}): take it out rather than save more often",
            )
            for lemon in lemon_nodes(by_node, fleet)[:3]
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run's journal says: mean costs, the failures by class, and how long how many nodes ran. Seconds.

    None where the journal has no such record.
    """

    stall_s: float | None = None
    write_s: float | None = None
    write_p95_s: float | None = None
    upload_s: float | None = None
    upload_p95_s: float | None = None
    restores_s: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    exposure_node_s: float = 0.0
    nodes: int | None = None
    saves: int = 0

    @property
    def shares(self) -> tuple[float, float, float]:
        """The share of each class, with the prior of ten failures."""
        return DEFAULT_SHARES.observe_counts({name: float(count) for name, count in self.failures.items()}).mean


def read_run_facts(records: Iterable[Mapping[str, object]]) -> RunFacts:
    """The facts in journal ``records``, which are dicts with a ``kind``; other kinds are passed over.

    ``stall``: seconds. ``write``: seconds, and ``tier`` (``node`` if absent, or ``remote``). ``restore``: seconds,
    class. ``failure``: t and class; only process, node and domain count, and one within a minute of another (or twice
    the restore) belongs to it. ``exposure``: node_s, and ``nodes`` if it is there: the latest counts.
    """
    stalls: list[float] = []
    writes: dict[str, list[float]] = {"node": [], "remote": []}
    restores: dict[str, list[float]] = {}
    failed: list[tuple[float, str]] = []
    exposure, nodes = 0.0, None
    for record in records:
        kind = record.get("kind")
        if kind == "stall":
            stalls.append(_number(record, "seconds"))
        elif kind == "write":
            writes.setdefault(str(record.get("tier", "node")), []).append(_number(record, "seconds"))
        elif kind == "restore":
            restores.setdefault(str(record.get("class", "node")), []).append(_number(record, "seconds"))
        elif kind == "failure":
            failed.append((_number(record, "t"), str(record.get("class", "node"))))
        elif kind == "exposure":
            exposure += _number(record, "node_s")
            nodes = int(_number(record, "nodes")) if "nodes" in record else nodes
    every_restore = [seconds for values in restores.values() for seconds in values]
    window = burst_window_s(_mean(every_restore) or 0.0)
    counts = {"process": 0, "node": 0, "domain": 0}
    previous = float("-inf")
    for t, name in sorted(failed):
        if name not in counts:
            continue
        if t - previous >= window:
            counts[name] += 1
        previous = t
    return RunFacts(
        stall_s=_mean(stalls),
        write_s=_mean(writes["node"]),
        write_p95_s=_p95(writes["node"]),
        upload_s=_mean(writes["remote"]),
        upload_p95_s=_p95(writes["remote"]),
        restores_s={name: sum(values) / len(values) for name, values in restores.items()},
        failures=counts,
        exposure_node_s=exposure,
        nodes=nodes,
        saves=len(stalls),
    )


def _number(record: Mapping[str, object], key: str) -> float:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError("--run", dict(record), f"a journal record of this kind needs a number {key!r}")
    return float(value)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _p95(values: list[float]) -> float | None:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))] if values else None
