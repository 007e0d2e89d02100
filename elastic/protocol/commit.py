"""Whether the shares of an attempt are one point in time. Pure.

A snapshot mixed from two steps loads without a word and trains on nonsense; so every way of telling the moment must
agree on every rank, or there is no commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields

from elastic.errors import CommitRefused
from elastic.protocol.shares import Agreement, PointInTime, ShareReport

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
    check_agreements({report.rank: report.agreements for report in reports}, _attempt(reports))
    return check_points({report.rank: report.point for report in reports}, _attempt(reports))


def check_points(points: Mapping[int, PointInTime], where: str) -> PointInTime:
    """The one moment of all ranks, or CommitRefused with the first field they differ in, ranks and values."""
    for field in fields(PointInTime):
        _agree({rank: getattr(point, field.name) for rank, point in points.items()}, field.name, where)
    return next(iter(points.values()))


def check_agreements(agreements: Mapping[int, Sequence[Agreement]], where: str) -> None:
    """Raise CommitRefused unless all ranks that hold a group of tensors planned from the same list of them: then their
    shares tile each tensor. Also if two groups are the same tensors. Names the first of them, and the ranks."""
    told: dict[tuple[str, int], dict[str, list[int]]] = {}
    holders: dict[tuple[str, int], int] = {}
    for rank, said in sorted(agreements.items()):
        for one in said:
            holders[one.held_at, one.part] = one.holders
            told.setdefault((one.held_at, one.part), {}).setdefault(one.told, []).append(rank)
    for (held_at, part), versions in told.items():
        ranks = sorted(rank for found in versions.values() for rank in found)
        if len(versions) == 1 and len(ranks) == holders[held_at, part]:
            continue
        found = "; ".join(f"{_ranks(who)}: {what}" for what, who in versions.items())
        where_held = f"at {held_at}" if held_at else "of the mesh"
        raise CommitRefused(
            f"the {holders[held_at, part]} ranks {where_held} do not hold the same tensors: {found}",
            where,
            "say with elastic.declare what is cut (cuts=...) or held by some ranks only (held_at=..., names=...)",
        )
    holder: dict[str, str] = {}
    for (held_at, _), (what,) in told.items():
        if (other := holder.setdefault(what, held_at)) != held_at:
            raise CommitRefused(
                f"the ranks at {other or 'every place'} and those at {held_at or 'every place'} hold different parts "
                f"of the model under the same names: {what}",
                where,
                "give them their names in the whole model, as elastic.declare(stage, held_at=..., names={'0': '8'}); "
                "or say that both hold the same, as held_at={'pp': (0, 1)}",
            )


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
