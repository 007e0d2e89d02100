"""What a controller finds in durable storage when it begins: committed snapshots, the last generation's number, and,
where it takes over from another, what that one had written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from elastic.clock import wall
from elastic.config import RestoreConfig, RunConfig, parse_start
from elastic.errors import ConfigError, CorruptSnapshot
from elastic.journal import PREFIX, decode, segment_key
from elastic.protocol.tiers import RemoteSnapshot, RestoreOrder
from elastic.snapshot.manifest import SCHEMA
from elastic.snapshot.quarantine import quarantine
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.blob_store import BlobStore, open_store

RECENT_SEGMENTS = 20
"""Segments in which the newest commit and row of metrics are looked for: a controller writes one every few seconds."""


@dataclass(frozen=True, slots=True)
class Durable:
    """Committed snapshots, newest first, and the highest generation that was ever begun."""

    snapshots: tuple[RemoteSnapshot, ...]
    generation: int
    epoch: int = 0
    """Of the newest controller that wrote anything."""
    skipped: tuple[str, ...] = ()
    """Snapshots in quarantine, in words."""


@dataclass(frozen=True, slots=True)
class Predecessor:
    """What the newest controller of a run had written when it was lost."""

    epoch: int = 0
    life: str = ""
    state: dict[str, Any] | None = None
    """See ``run_record``; None if it had decided nothing."""
    clock_shift_s: float = 0.0
    """What has to be added to its times for this host's clock."""
    decided: frozenset[str] = frozenset()
    """The attempt of the newest snapshot whose commit it had decided."""
    metrics: tuple[int, int] = (-1, -1)
    """Generation and step of the newest row of metrics that is written."""
    ended: dict[str, Any] | None = field(default=None)
    """Its last word, where the run had ended."""


def what_is_durable(store: BlobStore, run: str) -> Durable:
    """Check that ``store`` can be used, write ``run.json`` if it is the first time, and look. Raises StorageError, and
    CorruptSnapshot if every snapshot is in quarantine: to begin anew would forget them all."""
    store.check()
    store.put_if_absent(f"{run}/run.json", json.dumps({"schema": SCHEMA, "run": run, "created_at_s": wall()}).encode())
    catalog = SnapshotCatalog(store, run)
    refs = catalog.list()
    failed = [ref for ref in refs if ref.directory in catalog.failed]
    skipped = tuple(
        f"the snapshot of step {ref.step} ({ref.snapshot_id}) is in quarantine: {catalog.failed[ref.directory]}"
        for ref in failed
    )
    if refs and len(failed) == len(refs):
        raise CorruptSnapshot(
            f"every snapshot of the run failed to restore before; {skipped[0]}",
            f"{store.url}/{run}",
            "repair it and run 'elastic snapshots verify --all --deep', or begin under another name",
        )
    snapshots = tuple(RemoteSnapshot(ref.attempt, ref.step, earlier=True) for ref in refs if ref not in failed)
    generation = epoch = 0
    for records in _last_segments(store, run).values():
        generation = max([generation, *(int(r["generation"]) for r in records if isinstance(r.get("generation"), int))])
        epoch = max(epoch, int(records[0].get("epoch", 0)))
    return Durable(snapshots, generation, epoch, skipped)


def give_up(store: BlobStore, run: str, attempt: str, reason: str) -> None:
    """Put the committed snapshot of ``attempt`` into quarantine. Raises StorageError."""
    for ref in SnapshotCatalog(store, run).list():
        if ref.attempt == attempt:
            quarantine(store, ref, reason, wall())


def how_to_restore(run: RunConfig, order: RestoreOrder | None) -> RestoreConfig | None:
    """How the ranks take up what they are ordered to restore: as configured what was there when the run was started,
    strictly what it committed since (None). With ``start_from`` the configuration is meant for that snapshot, and the
    run's own from an earlier start are taken up strictly."""
    if order is None or not order.earlier:
        return None
    if run.start_from and not order.other_run:
        return RestoreConfig(accept_versions=run.restore.accept_versions)
    return run.restore


def start_of(start_from: str, mode: str, store: BlobStore, run: str) -> RemoteSnapshot:
    """The snapshot of another run to begin with. Raises ConfigError if there is none.

    Weights alone begin a new count of steps, so their snapshot stands for step 0; everything else goes on counting.
    """
    storage, other, which = parse_start(start_from)
    if other == run and storage in ("", store.url):
        raise ConfigError("start_from", start_from, "is this run itself; leave it out to resume")
    place = open_store(storage) if storage else store
    catalog = SnapshotCatalog(place, other)
    refs = catalog.restorable() if which == "latest" else catalog.list()
    if which != "latest":
        refs = [ref for ref in refs if which in (str(ref.step), ref.snapshot_id, ref.directory)] or [
            ref for ref in refs if not which.isdecimal() and ref.snapshot_id.startswith(which)
        ]
    if not refs:
        what = "no snapshot" if which == "latest" else f"no snapshot {which!r}"
        raise ConfigError("start_from", start_from, f"run {other!r} has {what} in {place.url}")
    return RemoteSnapshot(
        refs[0].attempt, 0 if mode == "weights" else refs[0].step, run=other, storage=storage, earlier=True
    )


def predecessor(store: BlobStore, run: str, at: float, wall_s: float) -> Predecessor:
    """The last words of the newest controller. ``at`` and ``wall_s``: this host's clocks now. Raises StorageError."""
    newest, last = "", [{"epoch": -1}]
    for controller, records in _last_segments(store, run).items():
        if int(records[0].get("epoch", 0)) > int(last[0].get("epoch", 0)):
            newest, last = controller, records
    if not newest:
        return Predecessor()
    head = last[0]
    state = head.get("state")
    shift = (at - wall_s) - (float(head["clock"]) - float(head["t"]))
    if state is None and int(head["state_in"]) >= 0:
        key = segment_key(run, newest, int(head["state_in"]))
        state = next(decode(store.get(key), key)).get("state")
    # The commit that was decided last is in the last segments: it is written at once.
    keys = [key for key in store.list(f"{run}/{PREFIX}{newest}-") if key.endswith(".jsonl")]
    recent = [record for key in sorted(keys)[-RECENT_SEGMENTS:] for record in decode(store.get(key), key)]
    decided = [str(record["attempt"]) for record in recent if record["kind"] == "committed"]
    told = [(record["generation"], record["rows"][-1][0]) for record in recent if record["kind"] == "metrics"]
    ended = next((record for record in last if record["kind"] == "ended"), None)
    newest_row = max(told, default=(-1, -1))
    return Predecessor(int(head["epoch"]), str(head["life"]), state, shift, frozenset(decided[-1:]), newest_row, ended)


def _last_segments(store: BlobStore, run: str) -> dict[str, list[dict[str, Any]]]:
    """The last readable segment of every controller, by the controller's name."""
    last: dict[str, str] = {}
    for key in sorted(store.list(f"{run}/{PREFIX}")):
        last[key.rpartition("-")[0]] = key
    found = {}
    for name, key in last.items():
        try:
            records = list(decode(store.get(key), key))
        except CorruptSnapshot:
            continue
        if records:
            found[name.rpartition("/")[2]] = records
    return found
