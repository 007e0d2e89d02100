"""``elastic snapshots show``: what one snapshot holds, when it was taken, by whom, and in which files it lies."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic.cli.output import count, number, print_json
from elastic.cli.snapshots_find import WHICH, AsJson, Found, RunName, Storage, find, pinned_directories
from elastic.cli.snapshots_text import age, columns, durable_survives, size

if TYPE_CHECKING:
    from elastic.snapshot.index import SnapshotIndex
    from elastic.snapshot.manifest import Manifest, SnapshotRef
    from elastic.snapshot.written_boxes import WrittenBox

SHOWN_TENSORS = 20
"""So many are shown without ``--tensors``, the largest first."""


def show(
    which: Annotated[str, typer.Argument(metavar="STEP|ID", help=WHICH)] = "latest",
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor, with its boxes.")] = False,
    storage: Storage = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """One snapshot: tensors with dtype, shape and boxes, mesh, moment, versions, topology, parents, files."""
    from elastic.snapshot.written_boxes import written_boxes

    found = find(storage, run)
    ref = found.one(which)
    manifest, index = found.catalog.manifest(ref), found.catalog.open(ref)
    boxes = written_boxes(index.table)
    trace = trace_of(found, ref)
    if as_json:
        print_json({**to_json(found, ref, manifest, index, boxes), "trace": trace})
        return
    for text in lines(found, ref, manifest, index, boxes, tensors):
        print(text)
    for text in trace_lines(trace):
        print(text)


STALL, DRAIN = ("capture", "plan", "copy"), ("hash", "replicate", "upload", "commit")


def trace_of(found: Found, ref: SnapshotRef) -> dict[str, Any]:
    """Where the time of the snapshot went, as the run's journal tells; empty for one that no run took."""
    from elastic.observe.history import journal_records

    trace: dict[str, Any] = {}
    for record in journal_records(found.store, found.run, []):
        if record.get("attempt") != ref.attempt or record["kind"] not in ("snapshot", "durable"):
            continue
        parts = {**trace.get("parts_s", {}), **record.get("parts_s", {})}
        names = ("purpose", "nbytes", "copies", "stall_s", "written_bytes", "referenced_bytes")
        trace |= {name: record[name] for name in names if name in record} | {"parts_s": parts}
    return trace


def trace_lines(trace: dict[str, Any]) -> list[str]:
    """The trace in words: stall and drain apart."""
    if not trace:
        return []
    parts = trace["parts_s"]

    def told(names: tuple[str, ...]) -> str:
        return ", ".join(f"{name} {parts[name] * 1e3:.3g} ms" for name in names if name in parts)

    text = []
    if "stall_s" in trace:
        on = f", on {count(trace['copies'], 'node')} each" if trace["copies"] > 1 else ""
        text.append(
            f"  stall of training: {trace['stall_s'] * 1e3:.3g} ms for {size(trace['nbytes'])}{on}: {told(STALL)}"
        )
    if drained := told(DRAIN):
        new = f"; {size(trace['written_bytes'])} written" if "written_bytes" in trace else ""
        new += f", {size(trace['referenced_bytes'])} referred to" if trace.get("referenced_bytes") else ""
        text.append(f"  beside training: {drained}{new}")
    return text


def to_json(
    found: Found, ref: SnapshotRef, manifest: Manifest, index: SnapshotIndex, boxes: dict[str, list[WrittenBox]]
) -> dict[str, Any]:
    """Everything, JSON-able."""
    return {
        "run": found.run,
        "storage": found.store.url,
        "step": ref.step,
        "id": ref.snapshot_id,
        "directory": ref.directory,
        "attempt": ref.attempt,
        "schema": index.manifest.get("schema"),
        "committed_at_s": ref.committed_at_s,
        "depth": ref.depth,
        "pinned": ref.directory in pinned_directories(found.store, found.run),
        "quarantined": found.catalog.failed.get(ref.directory, ""),
        "survives": list(durable_survives(found.store)),
        "point": asdict(manifest.point),
        "mesh": dict(manifest.mesh.axes),
        "ranks": index.world_size,
        "writers": list(manifest.writers),
        "versions": dict(manifest.versions),
        "has": dict(manifest.has),
        "checksum": manifest.checksum,
        "counts": dict(manifest.counts),
        "metrics": dict(manifest.metrics),
        "parents": {directory: list(packs) for directory, packs in manifest.parents.items()},
        "files": [
            {"name": record.name, "kind": record.kind, "bytes": record.nbytes, "digest": record.digest}
            for record in manifest.files
        ],
        "tensors": [
            {
                "name": spec.name,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "bytes": spec.nbytes,
                "boxes": [
                    {
                        "offset": list(written.box.offset),
                        "shape": list(written.box.shape),
                        "pack": written.pack,
                        "chunks": written.chunks,
                    }
                    for written in boxes[spec.name]
                ],
            }
            for spec in index.table.specs
        ],
        "aliases": dict(index.table.aliases),
    }


def lines(
    found: Found,
    ref: SnapshotRef,
    manifest: Manifest,
    index: SnapshotIndex,
    boxes: dict[str, list[WrittenBox]],
    every_tensor: bool,
) -> list[str]:
    """The snapshot, in words."""
    point, counts = manifest.point, manifest.counts
    reason = found.catalog.failed.get(ref.directory, "")
    pinned = ", pinned" if ref.directory in pinned_directories(found.store, found.run) else ""
    text = [
        f"snapshot {ref.snapshot_id} of run {found.run!r}: step {ref.step:,}, "
        f"{age(time.time() - ref.committed_at_s)} old{pinned}",
        *([f"  in quarantine, it failed to restore: {reason}"] if reason else []),
        f"  moment: generation {point.generation}, {point.samples_seen:,} samples, {point.tokens_seen:,} tokens, "
        f"data cursor {point.data_cursor:,}",
    ]
    for what, steps in (("optimizer steps", point.optimizer_steps), ("scheduler steps", point.scheduler_steps)):
        if steps:
            text.append(f"  {what}: {', '.join(f'{name} {taken:,}' for name, taken in steps)}")
    held = [name for name, present in manifest.has.items() if present]
    text += [
        f"  size: {size(counts.get('bytes', 0))} in {count(len(index.table), 'chunk')}, "
        f"{size(counts.get('new_bytes', 0))} of it new; checksum {manifest.checksum}",
        f"  mesh: {manifest.mesh}, {count(index.world_size, 'rank')}"
        + (f" on {', '.join(manifest.writers)}" if manifest.writers else ""),
        f"  beside weights: {', '.join(held) or 'nothing'}",
        f"  versions: {', '.join(f'{what} {value}' for what, value in manifest.versions.items() if value) or '?'}",
    ]
    if manifest.metrics:
        text.append(f"  metrics: {', '.join(f'{name} {number(value)}' for name, value in manifest.metrics.items())}")
    text.append(f"  parents (depth {ref.depth}): {', '.join(manifest.parents) or 'none, it stands alone'}")
    text.append(f"  files in {ref.prefix}:")
    text += [
        f"    {line}"
        for line in columns(
            ("file", "kind", "size", "digest"),
            [(r.name, r.kind, size(r.nbytes), r.digest[:40]) for r in manifest.files],
            left=(0, 1, 3),
        )
    ]
    specs = list(index.table.specs)
    chosen = specs if every_tensor else sorted(specs, key=lambda spec: -spec.nbytes)[:SHOWN_TENSORS]
    text.append(f"  {count(len(specs), 'tensor')}{'' if len(chosen) == len(specs) else ', the largest of them'}:")
    rows = []
    for spec in chosen:
        parts = boxes[spec.name]
        where = " ".join(f"{w.box}@{w.pack.rpartition('/')[2]}" for w in parts) if every_tensor else str(len(parts))
        rows.append((spec.name, spec.dtype, str(list(spec.shape)), size(spec.nbytes), where))
    text += [f"    {line}" for line in columns(("name", "dtype", "shape", "size", "boxes"), rows, left=(0, 1, 2, 4))]
    text += [f"    {alias} is {name}" for alias, name in index.table.aliases]
    if len(chosen) < len(specs):
        text.append(f"    and {count(len(specs) - len(chosen), 'smaller one')}: see them with --tensors")
    return text
