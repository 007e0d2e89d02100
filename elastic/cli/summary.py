"""What a run came to, in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from elastic.cli.output import count, number, seconds
from elastic.cli.progress import told, told_notice
from elastic.errors import DeterministicFailure
from elastic.result import OWN_COLUMNS, Result


def summary(result: Result) -> list[str]:
    """The lines that end ``elastic run``."""
    lines = [f"run {result.run!r} {_ended(result)}"]
    lines += [f"  {name}: {value}" for name, value in facts(result)]
    for incident in result.to_json()["incidents"]:
        lines.append(f"  incident at {seconds(incident['at_s'])}: {told(incident)}")
    lines += [f"  notice: {told_notice(notice)}" for notice in result.notices]
    lines += [f"  straggler: {straggler}" for straggler in result.stragglers]
    if result.snapshot:
        lines.append(f"  newest durable snapshot: {result.storage.rstrip('/')}/{result.run}/{result.snapshot}")
    again = not isinstance(result.error, DeterministicFailure)
    if result.status == "stopped" or (result.status == "failed" and result.snapshot and again):
        lines.append("  to resume: the same name and storage again")
    return lines


def _ended(result: Result) -> str:
    at = f"at step {result.step:,}"
    began = result.generations[0].restored_step if result.generations else 0
    resumed = f", resumed from step {began:,}" if began else ""
    return f"{result.status} {at}{resumed}" + (f" ({result.reason})" if result.status == "stopped" else "")


def facts(result: Result) -> list[tuple[str, str]]:
    """(name, value) of what is worth a line."""
    found = [(name, f"{number(first)} → {number(last)}") for name, (first, last) in first_and_last(result).items()]
    if result.wall_s > 0:
        found.append(("time", f"{seconds(result.wall_s)}, goodput {result.goodput:.1%}"))
    if len(result.generations) > 1:
        sizes = " → ".join(str(generation.world_size) for generation in result.generations)
        found.append(("generations", f"{len(result.generations)} ({sizes} ranks)"))
    if result.snapshots:
        stalls = [snapshot.stall_s for snapshot in result.snapshots]
        durable = sum(snapshot.remote for snapshot in result.snapshots)
        found.append(
            (
                "snapshots",
                f"{len(stalls)} in node memory, {durable} of them durable, stall {seconds(median(stalls))} (median)",
            )
        )
    if result.incidents:
        found.append(("incidents", f"{len(result.incidents)}, {count(result.steps_lost, 'step')} lost"))
    return found


def first_and_last(result: Result, window: int = 5) -> dict[str, tuple[float, float]]:
    """For each metric its mean over the first and the last few steps of this start; the two do not overlap."""
    window = max(1, min(window, len(result.metrics) // 2))
    names = [name for name in (result.metrics[-1] if result.metrics else {}) if name not in OWN_COLUMNS]
    return {name: (_mean(result.metrics[:window], name), _mean(result.metrics[-window:], name)) for name in names[:3]}


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else float("nan")
