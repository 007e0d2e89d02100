"""Shows a run while it goes on: a live panel on a terminal, plain lines anywhere else. Always on stderr.

What happened is told once, as a line that stays; what changes all the time is the panel, or a line every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from elastic.cli.output import count, number, say, seconds

LINE_EVERY_S = 5.0
DRAW_EVERY_S = 0.1

Status = dict[str, Any]


def news(before: Status | None, after: Status) -> list[str]:
    """What a person should know that happened between two statuses, in words."""
    old: Status = before or {}
    lines = []
    incidents = after["incidents"]
    lines += [told(incident) for incident in incidents[len(old.get("incidents", [])) :]]
    lines += [told_notice(notice) for notice in after.get("notices", [])[len(old.get("notices", [])) :]]
    if after["generation"] != old.get("generation", 0) and after["world_size"]:
        reason = after.get("mesh_reason", "")
        lines.append(
            f"generation {after['generation']}: {count(after['world_size'], 'rank')} ({after['mesh']}) "
            f"at step {after.get('began_at_step', after['step'])}{f'; {reason}' if 'spare' in reason else ''}"
        )
    restored = after.get("restored")
    if restored and restored != old.get("restored") and (restored["mode"] != "strict" or restored["notes"]):
        lines.append(f"restored {restored['text']}")
    if after["phase"] != old.get("phase") and after["phase"] in _PHASES:
        lines.append(_PHASES[after["phase"]])
    lines += [f"alarm: {alarm}" for alarm in _fresh(old.get("alarms", []), after["alarms"])]
    if after["journal_lag"] and after["journal_lag"] != old.get("journal_lag"):
        lines.append(f"alarm: the journal lags: {after['journal_lag']}")
    return lines


_PHASES = {
    "gathering": "waiting for ranks",
    "stopping": "stopping at the next boundary, to go on with other ranks or to end",
    "finishing": "all steps are done; making the last snapshot durable",
}


_KINDS = {"rank": "rank lost", "node": "node lost", "hang": "hung rank killed", "error": "error in the train function"}


def _fresh(old: Sequence[str], new: Sequence[str]) -> Sequence[str]:
    """What was added to a list that forgets its oldest entries."""
    for shared in range(min(len(old), len(new)), 0, -1):
        if list(old[-shared:]) == list(new[:shared]):
            return new[shared:]
    return new


def told(incident: Status) -> str:
    """One incident in a sentence."""
    what = _KINDS.get(incident["kind"], incident["kind"])
    ranks = f"{incident['old_world_size']} → {incident['new_world_size']} ranks"
    why = incident["why"].splitlines()[0][:200] if incident["why"] else "unknown"
    failure_class, rank = incident.get("failure_class", ""), incident.get("rank", -1)
    if failure_class and incident["kind"] != "error":
        what = f"{what} ({failure_class}{f', rank {rank}' if rank >= 0 else ''}: {why})"
    elif incident["kind"] == "error":
        which = f"rank {rank}, {failure_class}: " if rank >= 0 and failure_class else ""
        what = f"{what} ({which}{why})"
    took = f"going on after {seconds(incident['rto_s'])} ({split_text(incident['split'])})"
    stacks = f"; stacks in {incident['stacks']}" if incident.get("stacks") else ""
    return f"{what}, {incident['rung']}: {ranks}, {took}; {count(incident['steps_lost'], 'step')} lost{stacks}"


_WAYS = {
    "shrink": "went on with fewer ranks",
    "move": "moved to other nodes",
    "leave": "left it and waited for another place",
    "unwound": "a failure came first",
    "cancelled": "taken back",
}
_WORDS = {"drain": "Ray drains it", "sigterm": "SIGTERM", "exclude": "excluded", "straggler": "a rank is slow there"}


def told_notice(notice: Status) -> str:
    """What word that nodes go away has led to, in a sentence."""
    by = ", ".join(_WORDS.get(word, word) for word in notice["by"].split(", "))
    nodes = ", ".join(node[:12] for node in notice["nodes"])
    way = _WAYS.get(notice["purpose"], notice["purpose"])
    text = f"node {nodes} goes away ({by}): {way}"
    if notice["purpose"] not in ("shrink", "move", "leave"):
        return text
    ranks = f"{notice['old_world_size']} → {notice['new_world_size']} ranks"
    still = seconds(notice["stood_still_s"])
    return f"{text}, {ranks}; everybody out after {seconds(notice['out_s'])}, stood still for {still}, no step lost"


def split_text(split: Mapping[str, float]) -> str:
    """Where the time of an incident went, without the parts that took none."""
    names = {name.removesuffix("_s").replace("_", " "): value for name, value in split.items()}
    return ", ".join(f"{name} {seconds(value)}" for name, value in names.items() if value >= 0.0005)


def figures(status: Status) -> list[tuple[str, str]]:
    """The run now, as (name, value)."""
    metrics = list(status["metrics"].items())[:3]
    node = status["snapshot_node"]
    remote = status["snapshot_remote_step"]
    due = status["next_snapshot_s"]
    rows = [("step", f"{status['step']:,}")]
    rows += [(name, number(value)) for name, value in metrics]
    if status["samples_per_s"]:
        rows.append(("samples/s", number(status["samples_per_s"])))
    rows.append(("generation", str(status["generation"])))
    rows.append(("ranks", f"{status['world_size']} of {status['target']}"))
    if node:
        rows.append(("snapshot in memory", f"step {node['step']:,}"))
    if remote is not None:
        rows.append(("durable", f"step {remote:,}{' (uploading)' if status['uploading'] else ''}"))
    if due is not None:
        rows.append(("next snapshot", f"in {seconds(due)}" if due > 0.05 else "due"))
    if status["incidents"]:
        rows.append(("incidents", str(len(status["incidents"]))))
    if status["alarms"]:
        rows.append(("alarms", str(len(status["alarms"]))))
    return rows


def line(status: Status) -> str:
    """The run now, on one line."""
    return "  ".join(f"{name} {value}" for name, value in figures(status))


class PlainProgress:
    """Lines with the seconds since the start: news at once, figures every few seconds."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._before: Status | None = None
        self._shown_at = 0.0

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *problem: Any) -> None:
        return None

    def note(self, text: str) -> None:
        """A line that stays."""
        say(f"{time.monotonic() - self._started:7.2f} s  {text}")

    def show(self, status: Status) -> None:
        """The run now."""
        for text in news(self._before, status):
            self.note(text)
        moved = self._before is None or status["step"] != self._before["step"]
        self._before = status
        if moved and time.monotonic() - self._shown_at >= LINE_EVERY_S and status["phase"] == "running":
            self._shown_at = time.monotonic()
            self.note(line(status))


class LiveProgress(PlainProgress):
    """The same with a panel below that changes in place."""

    def __init__(self, title: str) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveProgress:
        self._live.__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._live.__exit__(*problem)

    def note(self, text: str) -> None:
        from rich.text import Text

        # As Text, not as a string without markup: that would also be how the panel below is drawn again.
        self._console.print(Text(f"{time.monotonic() - self._started:7.2f} s  {text}"))

    def show(self, status: Status) -> None:
        for text in news(self._before, status):
            self.note(text)
        self._before = status
        if time.monotonic() - self._shown_at >= DRAW_EVERY_S:
            self._shown_at = time.monotonic()
            self._live.update(self._panel(status), refresh=True)

    def _panel(self, status: Status) -> Any:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        rows = [("phase", status["phase"]), *figures(status)]
        for first in range(0, len(rows), 3):
            grid.add_row(
                *(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in rows[first : first + 3])
            )
        return Panel(grid, title=self._title, title_align="left", expand=False)


def progress(title: str) -> PlainProgress:
    """Live where stderr is a terminal, plain elsewhere."""
    return LiveProgress(title) if sys.stderr.isatty() else PlainProgress()
