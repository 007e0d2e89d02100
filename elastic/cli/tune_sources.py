"""Where the failure rate of ``elastic tune`` comes from: typed numbers, a log, a preset, or the journal of a run."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.cli.tune_facts import Rate, RunFacts, burst_window_s, rate_from_counts, rate_from_preset, read_run_facts
from elastic.cli.tune_units import duration
from elastic.errors import ConfigError
from policies.domain import PolicyError
from policies.failure_log import FailureLog, read_failure_log
from policies.fleet import FleetRate
from policies.presets import preset

if TYPE_CHECKING:
    from elastic.cli.tune_asked import Asked

__all__ = ["fleet_rate", "job_rate", "journal_facts", "read_log"]


def job_rate(
    asked: Asked, counts: tuple[int, ...], log: FailureLog | None, facts: RunFacts | None, restart_s: float
) -> Rate:
    """The one rate that was asked for, for a job on the first of ``counts`` nodes."""
    given = {
        "--mtbf": asked.mtbf is not None,
        "--failures": asked.failures is not None,
        "--log": asked.log is not None,
        "--preset": asked.preset_name is not None,
    }
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        raise ConfigError(named[1], "given", f"{named[0]} says the failure rate already; give one of them")
    if asked.measured_nodes is not None and asked.measured_nodes < 1:
        raise ConfigError("--measured-nodes", asked.measured_nodes, "give a whole number of at least 1")
    nodes = counts[0] if counts else None
    rate: Rate
    if asked.mtbf is not None:
        value = duration("--mtbf", asked.mtbf, zero=False)
        measured = asked.measured_nodes or (nodes if len(counts) == 1 else None)
        scaled = value * asked.measured_nodes / nodes if asked.measured_nodes and nodes else value
        rate = Rate(scaled, "as given", None if measured is None else 1 / (value * measured))
    elif asked.failures is not None:
        if asked.failures < 0:
            raise ConfigError("--failures", asked.failures, "it must not be negative")
        if asked.hours is None or not 0 < asked.hours < float("inf"):
            raise ConfigError("--hours", asked.hours, "say in how many hours of running the failures were seen")
        rate = _counted(
            asked, asked.failures, asked.hours * 3600, counts, f"{asked.failures} failures in {asked.hours:g} h"
        )
    elif log is not None:
        window = burst_window_s(restart_s)
        count = log.count(window)
        source = f"{count} failures in {log.duration_s / 3600:.4g} h of {asked.log}"
        if len(log.failures) > count + log.starts_with_failure:
            source += f" ({len(log.failures)} lines; those within {window:.0f} s of another count once)"
        rate = _counted(asked, count, log.duration_s, counts, source)
    elif asked.preset_name is not None:
        fleet = preset(asked.preset_name)
        size = nodes or fleet.nodes
        if size is None:
            raise PolicyError(
                "E_MISSING", f"--nodes is missing: preset {fleet.name} is a rate per node; say for how many"
            )
        rate = rate_from_preset(fleet, size)
    elif facts is not None and facts.exposure_node_s > 0:
        rate = _from_journal(asked, facts, nodes)
    else:
        raise PolicyError(
            "E_MISSING",
            "--mtbf is missing: say how often it fails, or give --failures and --hours, --log, --preset or --run",
        )
    return _with_common(asked, rate)


def _from_journal(asked: Asked, facts: RunFacts, nodes: int | None) -> Rate:
    size = nodes or facts.nodes
    if size is None:
        raise PolicyError(
            "E_MISSING", "--nodes is missing: say for how many nodes; the journal gives the rate per node"
        )
    failures = sum(facts.failures.values())
    source = f"run {asked.run}: {failures} failures in {facts.exposure_node_s / 3600:.4g} node-hours"
    return rate_from_counts(
        failures, facts.exposure_node_s, nodes=size, measured_nodes=1, prior=asked.prior, source=source
    )


def _counted(asked: Asked, failures: int, exposure_s: float, counts: tuple[int, ...], source: str) -> Rate:
    nodes = counts[0] if counts else None
    if len(counts) > 1 and asked.measured_nodes is None:
        raise PolicyError("E_MISSING", "--measured-nodes is missing: say on how many nodes the failures were seen")
    return rate_from_counts(
        failures, exposure_s, nodes=nodes, measured_nodes=asked.measured_nodes, prior=asked.prior, source=source
    )


def _with_common(asked: Asked, rate: Rate) -> Rate:
    if asked.common_mtbf is None:
        return rate
    common = 1 / duration("--common-mtbf", asked.common_mtbf, zero=False)

    def joined(mtbf_s: float | None) -> float | None:
        return None if mtbf_s is None else 1 / (1 / mtbf_s + common)

    return replace(
        rate,
        mtbf_s=1 / (1 / rate.mtbf_s + common),
        low_s=joined(rate.low_s),
        high_s=joined(rate.high_s),
        source=f"{rate.source}, and one failure every {asked.common_mtbf} of what all nodes share",
    )


def fleet_rate(asked: Asked, rate: Rate, counts: tuple[int, ...], noticed: float) -> FleetRate:
    """The same rate by node, to ask what if."""
    if rate.per_node_s is None:
        raise PolicyError(
            "E_MISSING", "--measured-nodes is missing: say on how many nodes the MTBF holds, to scale from there"
        )
    common = 0.0 if asked.common_mtbf is None else 1 / duration("--common-mtbf", asked.common_mtbf, zero=False)
    return FleetRate(rate.per_node_s * (1 - noticed), common * (1 - noticed))


def read_log(field: str, path: Path) -> FailureLog:
    """The failure log in a file. Raises ``ConfigError`` or ``PolicyError`` that names the line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return read_failure_log(lines, str(path))
    except OSError as problem:
        raise ConfigError(field, str(path), f"it cannot be read ({problem.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(field, str(path), "it is not text in UTF-8; export it as CSV") from None
    except csv.Error as problem:
        raise ConfigError(field, str(path), f"it is not CSV ({problem})") from None


def journal_facts(run: str, storage: str | None) -> RunFacts:
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
