"""What a controller finds in durable storage when it begins: committed snapshots, and the last generation's number."""

from __future__ import annotations

import json
from dataclasses import dataclass

from elastic.clock import wall
from elastic.errors import CorruptSnapshot
from elastic.journal import PREFIX, decode
from elastic.protocol.tiers import RemoteSnapshot
from elastic.snapshot.manifest import SCHEMA
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.blob_store import BlobStore


@dataclass(frozen=True, slots=True)
class Durable:
    """Committed snapshots, newest first, and the highest generation that was ever begun."""

    snapshots: tuple[RemoteSnapshot, ...]
    generation: int


def what_is_durable(store: BlobStore, run: str) -> Durable:
    """Check that ``store`` can be used, write ``run.json`` if it is the first time, and look. Raises StorageError."""
    store.check()
    store.put_if_absent(f"{run}/run.json", json.dumps({"schema": SCHEMA, "run": run, "created_at_s": wall()}).encode())
    refs = SnapshotCatalog(store, run).list()
    snapshots = tuple(RemoteSnapshot(ref.attempt, ref.step) for ref in refs)
    return Durable(snapshots, _last_generation(store, run))


def _last_generation(store: BlobStore, run: str) -> int:
    """From the last segment of every controller: each segment begins with the generation it was written in."""
    last: dict[str, str] = {}
    for key in store.list(f"{run}/{PREFIX}"):
        last[key.rpartition("-")[0]] = key
    newest = 0
    for key in last.values():
        try:
            records = list(decode(store.get(key), key))
        except CorruptSnapshot:
            continue
        newest = max([newest, *(int(r["generation"]) for r in records if isinstance(r.get("generation"), int))])
    return newest
