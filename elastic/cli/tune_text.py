"""The answer of ``elastic tune`` for people: a table, and the same in words."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic.cli.tune_answer import Answer, ordinal
from elastic.cli.tune_units import duration_text

__all__ = ["explain", "print_answer"]


def print_answer(console: Console, found: Answer) -> None:
    """Print the recommendation, where the time goes, what the alternatives cost, and the warnings."""
    problem = found.problem
    console.print()
    headline = Text("Save after every ", style="bold")
    headline.append(duration_text(found.interval_s), style="bold green")
    headline.append(" of work")
    if found.steps is not None:
        headline.append(f" ({found.steps} steps)")
    if problem.remote is not None:
        headline.append(", every ")
        headline.append(ordinal(found.k), style="bold green")
        headline.append(" of them also to the remote tier")
    console.print(headline)

    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    facts.add_row("useful time", f"{found.efficiency:.2%}")
    lost = found.lost_time
    facts.add_row(
        "lost to",
        f"saves {lost.save:.2%}, work done again {lost.rework:.2%}, restarts {lost.restart:.2%}, "
        f"write latency {lost.latency:.2%}",
    )
    size = f" on {found.scale[0].nodes} nodes" if found.scale else ""
    facts.add_row("failures", f"one every {duration_text(found.rate.mtbf_s)}{size}{_band(found)}")
    facts.add_row("", found.rate.source + (f"; with a prior {found.rate.prior}" if found.rate.prior else ""))
    facts.add_row("one save", _cost(found))
    if found.interval_low_s is not None and found.interval_high_s is not None and not found.binding:
        facts.add_row(
            "interval, 95 %", f"{duration_text(found.interval_low_s)} to {duration_text(found.interval_high_s)}"
        )
    if found.remote_period_s is not None:
        facts.add_row("remote period", duration_text(found.remote_period_s))
    if found.binding:
        facts.add_row("held by", f"{found.binding}; without it {duration_text(found.wanted_s)}")
    if found.schedule_s:
        first = ", ".join(duration_text(interval) for interval in found.schedule_s[:5])
        facts.add_row("schedule", f"after a failure {first}, ...")
    if found.finite is not None:
        facts.add_row(
            "this job", f"{found.finite.segments} segments, done after {duration_text(found.finite.expected_s)}"
        )
    if found.final_save is not None:
        facts.add_row("on a notice", f"final save to: {found.final_save.target} ({found.final_save.reason})")
    if found.validation is not None:
        check = found.validation
        facts.add_row(
            "simulated",
            f"{check.efficiency:.4%} +- {check.standard_error:.4%}, {check.failures:,} failures, z = {check.z:+.2f}",
        )
    if found.replay is not None:
        replay = found.replay
        facts.add_row(
            "your log",
            f"{replay.efficiency:.2%} over {replay.failures} failures; model {replay.model:.2%}; best in hindsight "
            f"{replay.hindsight_efficiency:.2%} at {duration_text(replay.hindsight_interval_s)}",
        )
        if replay.online_efficiency is not None:
            facts.add_row("", f"the online loop: {replay.online_efficiency:.2%} with {replay.online_changes} changes")
    console.print(facts)
    console.print()
    console.print(_alternatives(found))
    if found.scale:
        console.print()
        console.print(_scale(found))
        console.print(Text(scale_words(found), style="italic"))
    for finding in found.findings:
        style = "bold red" if finding.level == "refuse" else "yellow"
        console.print(Text(f"{'refused' if finding.level == 'refuse' else 'warning'} ", style=style), end="")
        console.print(Text(f"{finding.message} [{finding.code}]"))


def _band(found: Answer) -> str:
    low, high = found.rate.low_s, found.rate.high_s
    if low is None or high is None:
        return " (as given; its uncertainty is not known)"
    return f" (95 %: {duration_text(low)} to {duration_text(high)})"


def _cost(found: Answer) -> str:
    local = found.problem.local
    text = f"{duration_text(local.visible_s)} of training"
    if local.write_s > 0:
        text += f" (stall {duration_text(local.stall_s)}, write {duration_text(local.write_s)} at {local.slowdown:.0%})"
    remote = found.problem.remote
    if remote is not None:
        text += (
            f"; a remote one {duration_text(remote.visible_s)} more "
            f"(stall {duration_text(remote.stall_s)}, upload {duration_text(remote.write_s)} at {remote.slowdown:.0%})"
        )
    return text


def _alternatives(found: Answer) -> Table:
    table = Table(title="and otherwise", title_justify="left", title_style="dim")
    table.add_column("what if")
    table.add_column("interval", justify="right")
    table.add_column("useful time", justify="right")
    table.add_column("overhead", justify="right")
    base = max(1 - found.efficiency, 1e-12)
    table.add_row("this answer", duration_text(found.interval_s), f"{found.efficiency:.2%}", "x 1.00", style="bold")
    names = {
        ("interval", 0.5): "half the interval",
        ("interval", 2.0): "double the interval",
        ("mtbf", 0.5): "failures twice as often",
        ("mtbf", 2.0): "failures half as often",
    }
    for entry in found.sensitivity:
        interval = found.interval_s * (entry.factor if entry.what == "interval" else 1)
        note = "" if entry.what == "interval" else " of the best then"
        table.add_row(
            names[entry.what, entry.factor],
            duration_text(interval),
            f"{entry.efficiency:.2%}",
            f"x {entry.overhead:.2f}{note}",
        )
    for rival in found.rivals:
        over = "-" if rival.efficiency <= 0 else f"x {(1 - rival.efficiency) / base:.2f}"
        table.add_row(rival.name.capitalize(), duration_text(rival.interval_s), f"{rival.efficiency:.2%}", over)
    return table


def _scale(found: Answer) -> Table:
    table = Table(title="best achievable goodput by scale", title_justify="left", title_style="dim")
    for title in ("nodes", "a failure every", "interval", "k", "goodput", "with saves at half cost", "with free saves"):
        table.add_column(title, justify="right")
    for point in found.scale:
        table.add_row(
            str(point.nodes),
            duration_text(point.mtbf_s),
            duration_text(point.interval_s),
            str(point.k) if found.problem.remote is not None else "-",
            f"{point.goodput:.2%}",
            f"{point.half_cost:.2%}",
            f"{point.free:.2%}",
        )
    return table


def scale_words(found: Answer) -> str:
    """Up to which scale a faster snapshot is worth nothing that matters, and from where it is restarts that count."""
    matters = [point for point in found.scale if point.half_cost - point.goodput >= 0.01]
    restarts = [point for point in found.scale if 1 - point.free > point.free - point.goodput]
    words = []
    if not matters:
        words.append("At none of these sizes does halving the cost of a save win a whole point of goodput.")
    else:
        words.append(f"Halving the cost of a save wins a point of goodput or more from {matters[0].nodes} nodes on.")
    if restarts:
        words.append(
            f"From {restarts[0].nodes} nodes on more is lost to restarts than any faster snapshot could win back: "
            "there, faster recovery or fewer failures matter."
        )
    return " ".join(words)


def explain(found: Answer) -> str:
    """The answer in words: what was assumed, why this interval, what would change it, and how sure it is."""
    problem = found.problem
    local, mtbf = problem.local, found.rate.mtbf_s
    lines = [found.reason[0].upper() + found.reason[1:] + "."]
    lines.append(
        f"Why: a save costs {duration_text(problem.visible_s)} of training"
        + (
            f" ({duration_text(local.stall_s)} of standing still and {local.slowdown:.0%} of the speed during a write "
            f"of {duration_text(local.write_s)})"
            if local.write_s
            else ""
        )
        + ", and a failure costs on average half an interval of work. Saving more often pays the first, saving less "
        f"often the second; the sum is least at {duration_text(found.wanted_s)}."
    )
    if problem.remote is None and problem.policy == "exact":
        lines.append(
            "The interval is M (1 + W0(-exp(-1 - a/M))) with a = "
            f"{problem.visible_s:.6g} s and M = {mtbf:.6g} s, the exact optimum for failures without memory; "
            f"Young's formula gives {duration_text(found.rivals[0].interval_s)} and Daly's "
            f"{duration_text(found.rivals[1].interval_s)}, its first term and its first three."
        )
    if problem.remote is not None:
        process, node, domain = problem.shares
        lines.append(
            f"Of the failures {process:.0%} hit a process, {node:.0%} a node and {domain:.1%} more than the local tier "
            f"survives; only the last kind needs the remote tier, so only every {ordinal(found.k)} save goes there."
        )
    if found.binding:
        lines.append(
            f"The constraint '{found.binding}' holds: without it the interval would be {found.wanted_s:.4g} s."
        )
    lost = found.lost_time
    parts = {
        "saves": lost.save,
        "work done again": lost.rework,
        "restarts": lost.restart,
        "write latency": lost.latency,
    }
    worst = max(parts, key=lambda name: parts[name])
    lines.append(
        f"Of the {1 - lost.useful:.2%} that is lost, most goes into {worst} ({parts[worst]:.2%}). "
        f"Restarts and write latency do not move the interval; they only cost."
    )
    half, double = found.sensitivity[0], found.sensitivity[1]
    lines.append(
        f"The optimum is flat: half the interval costs {half.overhead:.2f} times the overhead, double "
        f"{double.overhead:.2f} times; "
        f"if the MTBF were half, keeping this interval would cost {found.sensitivity[2].overhead:.2f} times the least."
    )
    if found.rate.low_s is not None and found.rate.high_s is not None:
        upper = duration_text(found.rate.high_s) if math.isfinite(found.rate.high_s) else "without bound"
        lines.append(
            f"How sure: the MTBF is from {found.rate.source}; with 95 % confidence it lies between "
            f"{duration_text(found.rate.low_s)} and {upper}."
        )
    else:
        lines.append(f"How sure: the MTBF is {found.rate.source}, so that its uncertainty is not part of this answer.")
    if found.scale:
        lines.append(scale_words(found))
    lines.extend(f"Note: {finding.message} [{finding.code}]." for finding in found.findings)
    return "\n".join(lines)
