"""Retention and collection: which snapshots a run lets go, and which files nobody needs any more.

Mark and sweep. Every committed manifest marks its own files and the packs of older snapshots that it refers to; what
is not marked is swept after a grace time, so that a reader that has opened a snapshot can finish. A snapshot is let go
in this order: a note with the time (DROPPED), then its marker, so that no reader finds it, then, after the grace time,
its files, the note last. Stopped anywhere, it can be run again. What is in flight is never touched.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.errors import RestoreError
from elastic.retention import Candidate, Retention
from elastic.snapshot.manifest import Manifest, SnapshotRef, canonical_json
from elastic.snapshot.object_names import (
    DROPPED,
    MARKER,
    QUARANTINED,
    generation_of,
    opened_at_s,
    parse_key,
    pins_prefix,
    snapshots_prefix,
)
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.blob_store import BlobStore

GRACE_S = 3600.0


@dataclass(frozen=True, slots=True)
class CollectionReport:
    """What a collection will do, or did. Keys are whole keys of the store."""

    keep: tuple[SnapshotRef, ...]
    drop: tuple[SnapshotRef, ...]
    delete: tuple[str, ...]
    blocked: tuple[str, ...] = ()
    """Why files were left although nothing is known to need them."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Directory of a snapshot that is kept to the reason."""


def plan_sweep(
    run: str,
    keys: Sequence[str],
    kept: Mapping[str, Manifest],
    dropped_at_s: Mapping[str, float],
    *,
    now_s: float,
    grace_s: float,
    in_flight: Collection[str] = (),
    generation: int | None = None,
) -> list[str]:
    """The keys to delete, in order. Pure.

    ``kept`` maps the directory of every committed snapshot that stays to its manifest; ``dropped_at_s`` tells when the
    others were let go. Files of an attempt that never committed go when it is older than ``grace_s`` and, where
    ``generation`` is given, of an older generation. Names that tell neither age nor generation stay.
    """
    marked = {f"{snapshots_prefix(run)}{pack}" for manifest in kept.values() for pack in manifest.packs()}
    doomed: dict[str, list[str]] = {}
    remaining: dict[str, int] = {}
    for key in keys:
        name = parse_key(run, key)
        if name is None or name.rest in (MARKER, DROPPED):
            continue
        remaining[name.directory] = remaining.get(name.directory, 0) + 1
        attempt = name.rest.partition("/")[0]
        stays = key in marked or name.directory in in_flight
        if (manifest := kept.get(name.directory)) is not None and attempt in (manifest.attempt, QUARANTINED):
            stays = True
        elif name.directory in dropped_at_s and manifest is None:
            stays |= now_s - dropped_at_s[name.directory] < grace_s
        else:
            opened, opened_in = opened_at_s(name.snapshot_id), generation_of(attempt)
            stays |= opened is None or now_s - opened < grace_s
            stays |= generation is not None and (opened_in is None or opened_in >= generation)
        if not stays:
            doomed.setdefault(name.directory, []).append(key)
    deletions = [key for found in doomed.values() for key in found]
    deletions += [
        f"{snapshots_prefix(run)}{directory}/{DROPPED}"
        for directory in dropped_at_s
        if directory not in kept and len(doomed.get(directory, ())) == remaining.get(directory, 0)
    ]
    return deletions


def collect(
    store: BlobStore,
    run: str,
    retention: Retention,
    *,
    now_s: float,
    grace_s: float = GRACE_S,
    in_flight: Collection[str] = (),
    generation: int | None = None,
    dry_run: bool = False,
    read_before: dict[str, bytes] | None = None,
) -> CollectionReport:
    """Let go of what ``retention`` does not keep, and sweep.

    ``in_flight`` names directories of snapshots that are being written and of those that they refer to. Kept in any
    case: what is pinned or in flight, and the newest snapshot that can be restored with all that are newer; one that is
    in quarantine does not count as such. A manifest
    that cannot be read may refer to anything, so while there is one no file is deleted; ``blocked`` says so.
    ``read_before``: of whoever collects again and again; what it need not read again is kept there.
    """
    catalog = SnapshotCatalog(store, run, read_before=read_before)
    refs = catalog.list()[::-1]
    manifests, blocked = _manifests(catalog, refs)
    reasons = _choose(catalog, refs, manifests, retention, _pins(store, run), in_flight)
    keep = tuple(ref for ref in refs if ref.directory in reasons)
    drop = tuple(ref for ref in refs if ref.directory not in reasons)
    if not dry_run:
        for ref in drop:
            store.put(f"{ref.snapshots}{ref.directory}/{DROPPED}", canonical_json({"dropped_at_s": now_s}))
            store.delete(f"{ref.snapshots}{ref.directory}/{MARKER}")
    keys = list(store.list(snapshots_prefix(run)))
    dropped = _dropped(catalog, keys, {ref.directory for ref in refs}) | {ref.directory: now_s for ref in drop}
    kept = {ref.directory: manifests[ref.directory] for ref in keep if ref.directory in manifests}
    delete: list[str] = []
    if not blocked:
        delete = plan_sweep(
            run, keys, kept, dropped, now_s=now_s, grace_s=grace_s, in_flight=in_flight, generation=generation
        )
    if not dry_run:
        for key in delete:
            store.delete(key)
    if read_before is not None:
        for gone in read_before.keys() - set(keys).difference(delete):
            read_before.pop(gone, None)
    return CollectionReport(keep, drop, tuple(delete), tuple(blocked), reasons)


def _choose(
    catalog: SnapshotCatalog,
    refs: Sequence[SnapshotRef],
    manifests: Mapping[str, Manifest],
    retention: Retention,
    pins: Collection[str],
    in_flight: Collection[str],
) -> dict[str, str]:
    """Directory to the reason why it stays. ``refs`` is oldest first."""
    candidates = [
        Candidate(
            ref.directory,
            ref.step,
            ref.committed_at_s,
            ref.directory in pins,
            manifests[ref.directory].metrics if ref.directory in manifests else {},
        )
        for ref in refs
    ]
    reasons = {c.directory: str(retention) for c, keeps in zip(candidates, retention(candidates)) if keeps}
    reasons |= {c.directory: "pinned" for c in candidates if c.pinned}
    reasons |= {ref.directory: "in flight" for ref in refs if ref.directory in in_flight}
    good = catalog.newest_good()
    for ref in reversed(refs):
        reasons.setdefault(
            ref.directory, "the newest" if good and ref == good[0] else "newer than what can be restored"
        )
        if good is not None and ref == good[0]:
            break
    return reasons


def _manifests(catalog: SnapshotCatalog, refs: Sequence[SnapshotRef]) -> tuple[dict[str, Manifest], list[str]]:
    found: dict[str, Manifest] = {}
    blocked = [f"{directory}: {reason}" for directory, reason in catalog.quarantined.items()]
    for ref in refs:
        try:
            found[ref.directory] = catalog.manifest(ref)
        except RestoreError as error:
            blocked.append(f"{ref.directory}: {error}")
    return found, blocked


def _dropped(catalog: SnapshotCatalog, keys: Sequence[str], committed: Collection[str]) -> dict[str, float]:
    """When the snapshots without a marker were let go. As long as there is the marker, another note may follow."""
    found: dict[str, float] = {}
    for key in keys:
        name = parse_key(catalog.run, key)
        if name is not None and name.rest == DROPPED and name.directory not in committed:
            try:
                found[name.directory] = float(json.loads(catalog.note(key))["dropped_at_s"])
            except (KeyError, ValueError, TypeError):
                continue  # Not ours to read: what is under it stays.
    return found


def _pins(store: BlobStore, run: str) -> set[str]:
    return {key.rpartition("/")[2] for key in store.list(pins_prefix(run))}


def pin(store: BlobStore, ref: SnapshotRef) -> None:
    """Keep ``ref`` whatever the rules say, until ``unpin``."""
    store.put(f"{pins_prefix(ref.run)}{ref.directory}", ref.to_bytes())


def unpin(store: BlobStore, ref: SnapshotRef) -> None:
    """Leave ``ref`` to the rules again."""
    store.delete(f"{pins_prefix(ref.run)}{ref.directory}")
