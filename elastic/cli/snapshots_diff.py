"""``elastic snapshots diff``: which tensors changed from one snapshot to another, and by how much."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from elastic.cli.output import count, print_json
from elastic.cli.snapshots_find import WHICH, AsJson, RunName, Storage, find
from elastic.cli.snapshots_text import columns, size

if TYPE_CHECKING:
    from elastic.snapshot.difference import Difference

SHOWN = 40


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=WHICH)],
    second: Annotated[str, typer.Argument(metavar="B", help=WHICH)],
    names: Annotated[str, typer.Option("--names", help="Only tensors whose name begins so.")] = "",
    to_run: Annotated[str | None, typer.Option("--to-run", help="B is of this other run of the storage.")] = None,
    storage: Storage = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Tensors that changed (elements, largest change, relative norm), that came and went, and other state by path."""
    from elastic.snapshot.difference import difference

    found = find(storage, run)
    other = find(storage, to_run) if to_run else found
    a, b = found.one(first), other.one(second)
    result = difference(
        found.catalog.open(a), found.catalog.source(a), other.catalog.open(b), other.catalog.source(b), names
    )
    if as_json:
        ends = {"a": {"step": a.step, "id": a.snapshot_id}, "b": {"step": b.step, "id": b.snapshot_id}}
        print_json({"run": found.run, **ends, "same": result.same, **asdict(result)})
        return
    print(f"from step {a.step:,} ({a.snapshot_id}) to step {b.step:,} ({b.snapshot_id})")
    for text in lines(result):
        print(f"  {text}")


def lines(found: Difference) -> list[str]:
    """The difference, in words; the largest changes first."""
    if found.same:
        return ["no difference, bit for bit"]
    text = [
        f"{count(len(found.changed), 'tensor')} changed, {found.unchanged:,} did not "
        f"({found.chunks_read:,} of {count(found.chunks, 'chunk')} read, {size(found.bytes_read)})"
    ]
    ordered = sorted(found.changed, key=lambda change: -(change.relative_norm or 0.0))
    rows = [
        (
            change.name,
            change.dtype,
            f"{change.changed:,} of {change.elements:,}",
            "?" if change.max_abs is None else f"{change.max_abs:.3g}",
            "?" if change.relative_norm is None else f"{change.relative_norm:.3g}",
            f"{change.not_finite:,} not finite" if change.not_finite else "",
        )
        for change in ordered[:SHOWN]
    ]
    if rows:
        text += columns(("name", "dtype", "elements", "largest", "relative", ""), rows, left=(0, 1, 5))
    if len(ordered) > SHOWN:
        text.append(f"and {len(ordered) - SHOWN} more; see them with --json")
    text += [f"added: {name}" for name in found.added]
    text += [f"removed: {name}" for name in found.removed]
    text += [f"retyped: {name} from {before} to {after}" for name, before, after in found.retyped]
    text += [f"tied otherwise: {name}" for name in found.retied]
    for change in found.objects:
        before = "not there" if change.before is None else change.before
        after = "not there" if change.after is None else change.after
        text.append(f"{change.path}: {before} → {after} (rank {', '.join(map(str, change.ranks[:8]))})")
    return text
