"""``elastic snapshots gc``, ``pin`` and ``unpin``: what stays, why, and what goes.

Whatever the flags say, pinned snapshots and the newest that can be restored stay, and so does every file that a
snapshot which stays refers to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic.cli.output import count, print_json, say
from elastic.cli.snapshots_find import WHICH, AsJson, Found, RunName, Storage, find
from elastic.cli.snapshots_text import age, size
from elastic.errors import ConfigError
from elastic.retention import Retention, best, every_hours, every_steps, everything, keep_last
from elastic.snapshot.object_names import parse_key

if TYPE_CHECKING:
    from elastic.snapshot.collect import CollectionReport
    from elastic.snapshot.manifest import SnapshotRef

SIZES_AT_ONCE = 8
SHOWN_FILES = 20


def pin_snapshot(
    which: Annotated[str, typer.Argument(metavar="STEP|ID", help=WHICH)],
    storage: Storage = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Keep a snapshot whatever retention says, until it is unpinned."""
    _set_pin(find(storage, run), which, True, as_json)


def unpin_snapshot(
    which: Annotated[str, typer.Argument(metavar="STEP|ID", help=WHICH)],
    storage: Storage = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Leave a snapshot to retention again."""
    _set_pin(find(storage, run), which, False, as_json)


def _set_pin(found: Found, which: str, pinned: bool, as_json: bool) -> None:
    from elastic.snapshot.collect import pin, unpin

    ref = found.one(which)
    (pin if pinned else unpin)(found.store, ref)
    if as_json:
        print_json({"run": found.run, "step": ref.step, "id": ref.snapshot_id, "pinned": pinned})
    else:
        what = "pinned: nothing removes it" if pinned else "not pinned any more: retention decides"
        print(f"step {ref.step:,} ({ref.snapshot_id}) is {what}")


def gc(
    name: Annotated[str | None, typer.Argument(metavar="RUN", help="The same as --run.")] = None,
    keep: Annotated[int | None, typer.Option("--keep", help="Keep the newest N.")] = None,
    steps: Annotated[int | None, typer.Option("--every-steps", help="Keep one every N steps.")] = None,
    hours: Annotated[float | None, typer.Option("--every-hours", help="Keep one every H hours.")] = None,
    smallest: Annotated[
        list[str] | None, typer.Option("--best", metavar="METRIC[:N]", help="Keep the N with the smallest METRIC.")
    ] = None,
    largest: Annotated[
        list[str] | None, typer.Option("--best-largest", metavar="METRIC[:N]", help="... with the largest METRIC.")
    ] = None,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds that files stay after their snapshot was let go, for readers.")
    ] = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go and why the rest stays.")] = False,
    storage: Storage = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Let go of what no rule keeps and remove files that nothing needs. Rules add up: what any of them keeps stays.

    Without a rule all snapshots stay, and only the leftovers of writes that failed are removed.
    """
    from elastic.snapshot.collect import collect

    if name and run and name != run:
        raise ConfigError("--run", run, f"it is also given as {name!r}; name one run")
    if not grace >= 0:
        raise ConfigError("--grace", grace, "give seconds, 0 or more")
    rule = retention_of(keep, steps, hours, smallest or [], largest or [])
    found = find(storage, run or name)
    generation = _live_generation(found)
    planned = collect(
        found.store,
        found.run,
        rule,
        now_s=time.time(),
        grace_s=grace,
        generation=generation,
        dry_run=True,
    )
    later = _later(found, planned, rule, generation)
    sizes = _sizes(found, [*planned.delete, *later])
    report = planned
    if not dry_run:
        report = collect(
            found.store, found.run, rule, now_s=time.time(), grace_s=grace, generation=generation, dry_run=False
        )
    if as_json:
        print_json(to_json(found, report, later, sizes, rule, dry_run))
        return
    for text in lines(report, later, sizes, rule, grace, dry_run):
        print(text)
    for reason in report.blocked:
        say(f"no file is removed while this cannot be read, it may need any of them: {reason}")


def retention_of(
    keep: int | None, steps: int | None, hours: float | None, smallest: Sequence[str], largest: Sequence[str]
) -> Retention:
    """The rules of the flags, joined by ``|``; ``everything`` without any. Raises ConfigError for bad numbers."""
    rules = [] if keep is None else [keep_last(keep)]
    rules += [] if steps is None else [every_steps(steps)]
    rules += [] if hours is None else [every_hours(hours)]
    for texts, is_largest in ((smallest, False), (largest, True)):
        for text in texts:
            metric, colon, number = text.rpartition(":")
            if colon and not number.isdecimal():
                raise ConfigError("--best", text, "give METRIC or METRIC:N, such as loss:2")
            rules.append(best(int(number) if colon else 1, metric if colon else text, largest=is_largest))
    return reduce(or_, rules) if rules else everything


def _live_generation(found: Found) -> int | None:
    """The generation whose attempts may still be written; None for a run that said that it has ended, or never began:
    then the age alone decides."""
    from elastic.observe.history import read_history

    history = read_history(found.store, found.run)
    return None if history.ended or not history.generation else history.generation


def _later(found: Found, planned: CollectionReport, rule: Retention, generation: int | None) -> list[str]:
    """Files of snapshots that are let go now, which go once the grace time is over."""
    from elastic.snapshot.collect import collect

    dropped = {ref.directory for ref in planned.drop}
    if not dropped:
        return []
    at_once = collect(found.store, found.run, rule, now_s=time.time(), grace_s=0.0, generation=generation, dry_run=True)
    now = set(planned.delete)
    names = ((key, parse_key(found.run, key)) for key in at_once.delete if key not in now)
    return [key for key, name in names if name is not None and name.directory in dropped]


def _sizes(found: Found, keys: Sequence[str]) -> dict[str, int]:
    def size_of(key: str) -> int:
        try:
            return found.store.size(key)
        except KeyError:
            return 0

    with ThreadPoolExecutor(SIZES_AT_ONCE) as threads:
        return dict(zip(keys, threads.map(size_of, keys)))


def to_json(
    found: Found, report: CollectionReport, later: Sequence[str], sizes: dict[str, int], rule: Retention, dry_run: bool
) -> dict[str, Any]:
    """What went, or would go, JSON-able."""
    return {
        "run": found.run,
        "storage": found.store.url,
        "dry_run": dry_run,
        "rule": str(rule),
        "keep": [{**_named(ref), "reason": report.reasons[ref.directory]} for ref in report.keep],
        "drop": [_named(ref) for ref in report.drop],
        "delete": list(report.delete),
        "delete_bytes": sum(sizes.get(key, 0) for key in report.delete),
        "delete_after_grace": list(later),
        "delete_after_grace_bytes": sum(sizes.get(key, 0) for key in later),
        "blocked": list(report.blocked),
    }


def _named(ref: SnapshotRef) -> dict[str, Any]:
    return {"step": ref.step, "id": ref.snapshot_id}


def lines(
    report: CollectionReport,
    later: Sequence[str],
    sizes: dict[str, int],
    rule: Retention,
    grace_s: float,
    dry_run: bool,
) -> list[str]:
    """What went, or would go, in words."""
    would = "would be " if dry_run else ""
    text = [f"rule: {rule}"]
    text += [f"  keeps step {ref.step:,} ({ref.snapshot_id}): {report.reasons[ref.directory]}" for ref in report.keep]
    text += [f"  {'would let' if dry_run else 'lets'} go of step {r.step:,} ({r.snapshot_id})" for r in report.drop]
    freed = sum(sizes.get(key, 0) for key in report.delete)
    text.append(f"{count(len(report.delete), 'file')}, {size(freed)}, {would}removed now")
    text += [f"  {key}" for key in report.delete[:SHOWN_FILES]]
    if len(report.delete) > SHOWN_FILES:
        text.append(f"  and {len(report.delete) - SHOWN_FILES} more; see them with --json")
    if later and grace_s:
        amount = size(sum(sizes.get(key, 0) for key in later))
        text.append(f"{count(len(later), 'file')} more, {amount}, can go in {age(grace_s)}, when gc is run again")
    return text
