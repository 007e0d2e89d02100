"""Whether the shares of an attempt are one point in time. Pure.

A snapshot mixed from two steps loads without a word and trains on nonsense; so every way of telling the moment must
agree on every rank, or there is no commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields

from elastic.errors import CommitRefused
from elastic.protocol.shares import PointInTime, ShareReport

_NAMED_RANKS = 8


def commit_check(reports: Sequence[ShareReport], world_size: int) -> PointInTime:
    """The moment that all ``world_size`` shares were taken at.

    Raises CommitRefused if a rank is missing or reported twice, if reports belong to different attempts, or if ranks
    differ in step, generation, data cursor, samples, tokens, optimizer or scheduler steps: it names ranks and values.
    """
    ranks = [report.rank for report in reports]
    if missing := sorted(set(range(world_size)) - set(ranks)):
        raise CommitRefused(f"{_ranks(missing)} sent no share", _attempt(reports), "take the snapshot again")
    if extra := sorted(rank for rank, times in Counter(ranks).items() if times > 1 or rank >= world_size):
        raise CommitRefused(
            f"{_ranks(extra)} sent a share that does not belong to a world of {world_size}", _attempt(reports)
        )
    _agree({report.rank: report.attempt for report in reports}, "attempt", _attempt(reports))
    return check_points({report.rank: report.point for report in reports}, _attempt(reports))


def check_points(points: Mapping[int, PointInTime], where: str) -> PointInTime:
    """The one moment of all ranks, or CommitRefused with the first field they differ in, ranks and values."""
    for field in fields(PointInTime):
        _agree({rank: getattr(point, field.name) for rank, point in points.items()}, field.name, where)
    return next(iter(points.values()))


def _agree(values: Mapping[int, object], what: str, where: str) -> None:
    groups: dict[object, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    if len(groups) > 1:
        found = "; ".join(f"{_ranks(ranks)}: {value!r}" for value, ranks in groups.items())
        raise CommitRefused(
            f"the shares are not one point in time, {what.replace('_', ' ')} differs: {found}",
            where,
            "every rank must step optimizer, scheduler and loader equally often between two boundaries",
        )


def _attempt(reports: Sequence[ShareReport]) -> str:
    return f"attempt {reports[0].attempt}" if reports else "an attempt without shares"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED_RANKS])) + (" …" if len(ranks) > _NAMED_RANKS else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
