"""Read a failure log that people keep by hand or export from somewhere, and say what is wrong with it, line by line.

CSV with a header. Columns: ``time`` (bare seconds, or ISO 8601), and optionally ``node``, ``class`` and ``note``.
Classes:

* ``process``, ``node``, ``domain``: failures (an empty class is ``node``);
* ``noticed``, ``planned``, ``user``: interruptions that are not failures of the machine; left out of the rate;
* ``start``, ``end``: when the record begins and ends. Without them it begins and ends with the first and last failure.

An impossible line is an error with its number. A line that is only strange (a duplicate, a long silence) is a finding.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from policies.diagnostics import decluster
from policies.domain import Finding, PolicyError

__all__ = ["FailureLog", "LoggedFailure", "read_failure_log"]

FAILURE_CLASSES = ("process", "node", "domain")
_OTHER_CLASSES = ("noticed", "planned", "user")
_COLUMNS = ("time", "node", "class", "note")
# A gap that one record in ten thousand would show by chance is worth the question whether anyone was looking.
_SILENCE_P = 1e-4


@dataclass(frozen=True, slots=True)
class LoggedFailure:
    """One failure: seconds since the record began, what failed, and the line it stands on."""

    time_s: float
    node: str
    failure_class: str
    line: int


@dataclass(frozen=True, slots=True)
class FailureLog:
    """A record of ``duration_s`` seconds. ``bounded`` says whether its start and its end are known.

    Where they are not, the record is taken to begin and end with a failure, and one failure fewer is counted for each
    gap.
    """

    failures: tuple[LoggedFailure, ...]
    duration_s: float
    starts_with_failure: bool
    ends_with_failure: bool
    left_out: int
    findings: tuple[Finding, ...]

    def times_s(self) -> list[float]:
        """All failure times, sorted."""
        return [failure.time_s for failure in self.failures]

    def episodes_s(self, window_s: float) -> list[float]:
        """The times of failures that begin an episode: closer ones than ``window_s`` belong to the one before."""
        return decluster(self.times_s(), window_s)

    def count(self, window_s: float) -> int:
        """The episodes to divide the duration by; the one that the record starts with opens it and does not count."""
        return max(0, len(self.episodes_s(window_s)) - (1 if self.starts_with_failure else 0))

    def gaps_s(self, window_s: float) -> list[float]:
        """The times from one episode to the next, the first one from the start of the record where that is known."""
        times = self.episodes_s(window_s)
        starts = times if self.starts_with_failure else [0.0, *times]
        return [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)]

    def censored_s(self, window_s: float) -> float:
        """The time from the last episode to the end of the record: a life that has not ended."""
        times = self.episodes_s(window_s)
        return self.duration_s - (times[-1] if times else 0.0)

    def by_class(self, window_s: float) -> dict[str, int]:
        """The episodes by class; an episode has the gravest class among its failures."""
        counts = dict.fromkeys(FAILURE_CLASSES, 0)
        for episode in self._episodes(window_s):
            counts[max((f.failure_class for f in episode), key=FAILURE_CLASSES.index)] += 1
        return counts

    def by_node(self) -> dict[str, int]:
        """The failures by node, where the log names nodes."""
        counts: dict[str, int] = {}
        for failure in self.failures:
            if failure.node:
                counts[failure.node] = counts.get(failure.node, 0) + 1
        return counts

    def _episodes(self, window_s: float) -> list[list[LoggedFailure]]:
        starts = set(self.episodes_s(window_s))
        episodes: list[list[LoggedFailure]] = []
        for failure in self.failures:
            if failure.time_s in starts and (not episodes or episodes[-1][0].time_s != failure.time_s):
                episodes.append([])
            episodes[-1].append(failure)
        return episodes


def read_failure_log(lines: Iterable[str], name: str = "log") -> FailureLog:
    """The record in ``lines`` of CSV; ``name`` stands in messages. Raises ``PolicyError`` with the line number."""
    rows = csv.reader(lines)
    header = [cell.strip().lower() for cell in next(rows, [])]
    if "time" not in header:
        raise PolicyError(
            "E_LOG_HEADER", f"{name}, line 1: no column 'time' in {header}; the first line must name the columns"
        )
    for column in header:
        if column not in _COLUMNS:
            raise PolicyError(
                "E_LOG_COLUMN",
                f"{name}, line 1: column {column!r} is not known; rename or remove it (known: {', '.join(_COLUMNS)})",
            )
        if header.count(column) > 1:
            raise PolicyError("E_LOG_COLUMN", f"{name}, line 1: column {column!r} stands there twice; remove one")

    begin: float | None = None
    end: float | None = None
    previous, previous_line = -math.inf, 1
    seen: dict[tuple[float, str, str], int] = {}
    duplicates: list[str] = []
    found: list[tuple[float, str, str, int]] = []
    left_out = 0
    iso: bool | None = None
    for row in rows:
        line = rows.line_num
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise PolicyError(
                "E_LOG_ROW",
                f"{name}, line {line}: {len(row)} cells under {len(header)} columns; correct the line",
            )
        cells = dict(zip(header, (cell.strip() for cell in row), strict=True))
        time, is_iso = _time(cells["time"], name, line)
        if iso is not None and is_iso != iso:
            raise PolicyError("E_LOG_TIME", f"{name}, line {line}: dates and bare seconds are mixed; use one of them")
        iso = is_iso
        kind = cells.get("class", "").lower() or "node"
        if time < previous:
            raise PolicyError(
                "E_LOG_ORDER",
                f"{name}, line {line}: time {cells['time']} is before that of line {previous_line}; sort by time",
            )
        previous, previous_line = time, line
        if end is not None:
            raise PolicyError("E_LOG_ORDER", f"{name}, line {line}: stands after the end of the record; move it before")
        if kind == "start":
            if begin is not None or found or left_out:
                raise PolicyError("E_LOG_ORDER", f"{name}, line {line}: 'start' must be the first line, and only once")
            begin = time
        elif kind == "end":
            end = time
        elif kind in _OTHER_CLASSES:
            left_out += 1
        elif kind in FAILURE_CLASSES:
            key = (time, cells.get("node", ""), kind)
            if key in seen:
                duplicates.append(f"line {line} repeats line {seen[key]}")
                continue
            seen[key] = line
            found.append((time, cells.get("node", ""), kind, line))
        else:
            known = ", ".join((*FAILURE_CLASSES, *_OTHER_CLASSES, "start", "end"))
            raise PolicyError("E_LOG_CLASS", f"{name}, line {line}: class {kind!r} is not known; use one of {known}")
    return _record(name, found, begin, end, left_out, duplicates)


def _record(
    name: str,
    found: Sequence[tuple[float, str, str, int]],
    begin: float | None,
    end: float | None,
    left_out: int,
    duplicates: Sequence[str],
) -> FailureLog:
    if not found and (begin is None or end is None):
        raise PolicyError("E_LOG_EMPTY", f"{name}: no failure, and no 'start' and 'end' lines to say for how long")
    origin = begin if begin is not None else found[0][0]
    last = end if end is not None else found[-1][0]
    if last <= origin:
        raise PolicyError(
            "E_LOG_EMPTY", f"{name}: the record lasts 0 s; it needs two failures, or 'start' and 'end' around one"
        )
    findings: list[Finding] = []
    if duplicates:
        more = f" and {len(duplicates) - 3} more" if len(duplicates) > 3 else ""
        findings.append(Finding("W_LOG_DUPLICATE", "warn", f"{name}: {'; '.join(duplicates[:3])}{more}; counted once"))
    findings.extend(_silences(name, found))
    failures = tuple(LoggedFailure(time - origin, node, kind, line) for time, node, kind, line in found)
    return FailureLog(failures, last - origin, begin is None, end is None, left_out, tuple(findings))


def _silences(name: str, found: Sequence[tuple[float, str, str, int]]) -> Iterable[Finding]:
    """Gaps that are too long to be chance at the log's own rate: perhaps nobody was writing."""
    if len(found) < 5:
        return
    mean = (found[-1][0] - found[0][0]) / (len(found) - 1)
    for earlier, later in zip(found, found[1:], strict=False):
        gap = later[0] - earlier[0]
        others = (found[-1][0] - found[0][0] - gap) / (len(found) - 2)
        if mean > 0 and others > 0 and (len(found) - 1) * math.exp(-gap / others) < _SILENCE_P:
            yield Finding(
                "W_LOG_GAP",
                "warn",
                f"{name}: no failure for {gap:.0f} s between lines {earlier[3]} and {later[3]}, "
                f"{gap / others:.0f} times the usual gap; if nothing was logged then, cut that time out",
            )


def _time(text: str, name: str, line: int) -> tuple[float, bool]:
    """(seconds, whether it was a date)."""
    if not text:
        raise PolicyError("E_LOG_TIME", f"{name}, line {line}: the time is missing; fill it in or remove the line")
    try:
        seconds = float(text)
    except ValueError:
        try:
            # Python 3.10 knows no trailing Z.
            date = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
        except ValueError:
            raise PolicyError(
                "E_LOG_TIME",
                f"{name}, line {line}: time {text!r} is neither seconds nor a date like 2026-01-31T12:00:00Z",
            ) from None
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp(), True
    if not math.isfinite(seconds) or seconds < 0:
        raise PolicyError("E_LOG_TIME", f"{name}, line {line}: time {text!r} is negative or not finite; correct it")
    return seconds, False
