"""Snapshots that failed to restore: a note beside the marker keeps every later start of the run from trying again.

The note is written once and touches no committed file: whoever repairs those and has all of them verified has the
snapshot back.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from elastic.snapshot.object_names import QUARANTINED
from elastic.storage.blob_store import BlobStore

if TYPE_CHECKING:
    from elastic.snapshot.manifest import SnapshotRef


def quarantine(store: BlobStore, ref: SnapshotRef, reason: str, now_s: float) -> None:
    """Keep ``ref`` from being restored until ``release``; the first reason that was given stays."""
    note = {"reason": reason, "quarantined_at_s": now_s}
    store.put_if_absent(_key(ref), json.dumps(note, sort_keys=True, separators=(",", ":")).encode())


def release(store: BlobStore, ref: SnapshotRef) -> None:
    """``ref`` was found whole: it may be restored again."""
    store.delete(_key(ref))


def reason_of(note: bytes) -> str:
    """Why a snapshot is in quarantine, from its note. One that cannot be read counts as well."""
    try:
        return str(json.loads(note)["reason"])
    except (ValueError, KeyError, TypeError):
        return "its note cannot be read"


def _key(ref: SnapshotRef) -> str:
    return f"{ref.snapshots}{ref.directory}/{QUARANTINED}"
