"""``elastic snapshots list``: every snapshot of a run that could be restored now, in storage and in node memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic.cli.connect import run_handle
from elastic.cli.local_runs import local_runs
from elastic.cli.output import print_json
from elastic.cli.snapshots_find import AsJson, Found, RunName, Storage, find, pinned_directories
from elastic.cli.snapshots_text import age, columns, durable_survives, memory_survives, size
from elastic.errors import ConfigError, ElasticError, RestoreError

if TYPE_CHECKING:
    from elastic.snapshot.manifest import SnapshotRef

MANIFESTS_AT_ONCE = 8
WEIGHTS_ONLY, TRAINING = "weights", "training"


def list_snapshots(
    name: Annotated[str | None, typer.Argument(metavar="RUN", help="The same as --run.")] = None,
    storage: Storage = None,
    run: RunName = None,
    address: Annotated[str | None, typer.Option("--address", help="The Ray cluster of a live run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Committed snapshots of both tiers: step, size, new bytes, age, depth, pins, and which failures each survives."""
    if name and run and name != run:
        raise ConfigError("--run", run, f"it is also given as {name!r}; name one run")
    found = find(storage, run or name)
    now = time.time()
    durable = durable_rows(found, now)
    memory = memory_rows(found.run, address, now)
    damaged = dict(found.catalog.quarantined)
    if as_json:
        print_json(
            {
                "run": found.run,
                "storage": found.store.url,
                "snapshots": [*memory, *durable],
                "damaged": [{"directory": directory, "reason": reason} for directory, reason in damaged.items()],
            }
        )
        return
    print(f"run {found.run!r} in {found.store.url}")
    for text in lines([*memory, *durable]):
        print(f"  {text}")
    for directory, reason in damaged.items():
        print(f"  damaged: {directory}: {reason}")


def durable_rows(found: Found, now_s: float) -> list[dict[str, Any]]:
    """Durable snapshots, newest first, as JSON-able rows. One whose manifest is damaged has a ``problem``."""
    pins = pinned_directories(found.store, found.run)
    survives = list(durable_survives(found.store))

    def row(ref: SnapshotRef) -> dict[str, Any]:
        known: dict[str, Any] = {
            "tier": "durable",
            "step": ref.step,
            "id": ref.snapshot_id,
            "attempt": ref.attempt,
            "committed_at_s": ref.committed_at_s,
            "age_s": max(0.0, now_s - ref.committed_at_s),
            "depth": ref.depth,
            "pinned": ref.directory in pins,
            "quarantined": found.catalog.failed.get(ref.directory, ""),
            "survives": survives,
        }
        try:
            manifest = found.catalog.manifest(ref)
        except RestoreError as error:
            return {**known, "survives": [], "problem": str(error)}
        return {
            **known,
            "bytes": manifest.counts.get("bytes", 0),
            "new_bytes": manifest.counts.get("new_bytes", 0),
            "parents": len(manifest.parents),
            "kind": TRAINING if any(manifest.has.values()) else WEIGHTS_ONLY,
            "ranks": manifest.counts.get("ranks", 0),
            "mesh": str(manifest.mesh),
            "metrics": dict(manifest.metrics),
        }

    with ThreadPoolExecutor(MANIFESTS_AT_ONCE) as threads:
        return list(threads.map(row, found.refs))


def memory_rows(run: str, address: str | None, now_s: float) -> list[dict[str, Any]]:
    """The snapshot in node memory of a live run; none where no cluster answers, which is no error."""
    if not address and not any(record.run == run for record in local_runs()):
        return []
    try:
        with run_handle(address, run) as handle:
            now = handle.status()
    except ElasticError:
        return []
    newest = now.get("snapshot_node")
    if not newest:
        return []
    age_s = max(0.0, float(now["wall_s"]) - float(newest["at_s"]))
    return [
        {
            "tier": "node",
            "step": newest["step"],
            "id": "",
            "attempt": newest["attempt"],
            "committed_at_s": now_s - age_s,
            "age_s": age_s,
            "depth": 0,
            "pinned": False,
            "bytes": newest["nbytes"],
            "new_bytes": newest["nbytes"],
            "copies": newest["copies"],
            "survives": list(memory_survives(int(newest["copies"]))),
        }
    ]


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as a table."""
    if not rows:
        return ["no snapshot is committed"]
    table = [
        (
            row["tier"],
            f"{row['step']:,}",
            row["id"] or row["attempt"],
            size(row["bytes"]) if "bytes" in row else "?",
            size(row["new_bytes"]) if "new_bytes" in row else "?",
            age(row["age_s"]),
            str(row["depth"]),
            "yes" if row["pinned"] else "",
            _worth(row),
        )
        for row in rows
    ]
    head = ("tier", "step", "id", "size", "new", "age", "depth", "pinned", "survives the loss of")
    return columns(head, table, left=(0, 2, 7, 8))


def _worth(row: dict[str, Any]) -> str:
    """What a snapshot survives, if it can be restored."""
    if "problem" in row:
        return f"damaged: {row['problem']}"
    if row.get("quarantined"):
        return f"in quarantine, it failed to restore: {row['quarantined']}"
    return survival(row["survives"])


def survival(losses: Sequence[str]) -> str:
    """The losses of a row in words."""
    return ", ".join(losses) or "nothing: it lives in this process"
