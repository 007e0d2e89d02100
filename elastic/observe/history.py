"""What a run's journal and markers tell of it, without its controller, its cluster or the code of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic.errors import ClusterError, CorruptSnapshot
from elastic.journal import PREFIX, decode
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.blob_store import BlobStore

MOST_ALARMS = 20


@dataclass(frozen=True, slots=True)
class History:
    """A run as storage knows it. ``step`` is the furthest that the journal saw, ``durable`` what can be resumed from,
    newest first."""

    run: str
    storage: str
    durable: tuple[SnapshotRef, ...] = ()
    starts: int = 0
    generation: int = 0
    world_size: int = 0
    mesh: str = ""
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    incidents: tuple[dict[str, Any], ...] = ()
    alarms: tuple[str, ...] = ()
    interval: str = ""
    ended: str = ""
    """``finished``, ``stopped`` or ``failed``; empty if the last controller never said so."""
    reason: str = ""
    last_word_at_s: float = 0.0
    unreadable: tuple[str, ...] = ()
    """Segments and markers that are damaged, with the reason."""

    def to_json(self) -> dict[str, Any]:
        """JSON-able values."""
        value = asdict(self)
        value["durable"] = [
            {"step": ref.step, "directory": ref.directory, "attempt": ref.attempt, "committed_at_s": ref.committed_at_s}
            for ref in self.durable
        ]
        return value


def read_history(store: BlobStore, run: str) -> History:
    """Read the whole journal. Raises ClusterError if the store holds no such run, StorageError if it cannot be read."""
    damaged: list[str] = []
    records = list(journal_records(store, run, damaged))
    catalog = SnapshotCatalog(store, run)
    durable = tuple(catalog.list())
    if not records and not durable and not store.exists(f"{run}/run.json"):
        raise ClusterError(f"there is no run {run!r} in {store.url}", "check the name and the storage")
    last: dict[str, dict[str, Any]] = {record["kind"]: record for record in records}
    begun, rows = last.get("begun", {}), last.get("metrics", {}).get("rows") or [[0, 0.0, {}]]
    newest = durable[0].step if durable else 0
    over = last.get("ended", {})
    if over and begun and begun["t"] > over["t"]:
        over = {}
    incidents = [
        {key: value for key, value in record.items() if key not in ("kind", "t")}
        for record in records
        if record["kind"] == "incident"
    ]
    alarms = [
        str(record.get("reason", ""))
        for record in records
        if record["kind"] == "alarm" or (record["kind"] == "abandoned" and record.get("reason"))
    ]
    return History(
        run=run,
        storage=store.url,
        durable=durable,
        starts=len({record["controller"] for record in records}),
        generation=int(begun.get("generation", 0)),
        world_size=int(begun.get("world_size", 0)),
        mesh=str(begun.get("mesh", "")),
        step=max(newest, int(rows[-1][0])),
        metrics=dict(rows[-1][2]),
        incidents=tuple(incidents),
        alarms=tuple(alarms[-MOST_ALARMS:]),
        interval=str(last.get("interval", {}).get("reason", "")),
        ended=str(over.get("status", "")),
        reason=str(over.get("reason", "")),
        last_word_at_s=max((float(record["t"]) for record in records), default=0.0),
        unreadable=(*damaged, *(f"{where}: {why}" for where, why in catalog.quarantined.items())),
    )


def runs_in(store: BlobStore) -> list[str]:
    """The names of all runs in the store, sorted."""
    return sorted({key.split("/", 1)[0] for key in store.list("") if key.count("/") == 1 and key.endswith("/run.json")})


def journal_records(store: BlobStore, run: str, damaged: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Every record in the order in which it was written; each also says which ``controller`` wrote it. A damaged
    segment raises CorruptSnapshot, or is named in ``damaged`` and left out."""
    keys = [key for key in store.list(f"{run}/{PREFIX}") if key.endswith(".jsonl")]
    for key in sorted(keys, key=_begun_at):
        controller = key.removeprefix(f"{run}/{PREFIX}").rpartition("-")[0]
        try:
            records = list(decode(store.get(key), key))
        except CorruptSnapshot as error:
            if damaged is None:
                raise
            damaged.append(str(error))
            continue
        for record in records:
            yield {**record, "controller": controller}


def _begun_at(key: str) -> tuple[int, str]:
    """Controllers by the second that their name says they began in, then their segments by number."""
    name = key.rpartition("/")[2]
    digits = name[1:].partition("-")[0]
    return (int(digits) if digits.isdigit() else 0, name)
