"""Which run and which snapshot a command means: the storage, the run in it, and a step, id or ``latest``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from elastic.cli.local_runs import local_runs
from elastic.cli.run_settings import absolute
from elastic.errors import ClusterError, ConfigError, CorruptSnapshot
from elastic.snapshot.names import listing
from elastic.snapshot.object_names import check_part, pins_prefix
from elastic.storage.blob_store import BlobStore, open_store

if TYPE_CHECKING:
    from elastic.snapshot.manifest import SnapshotRef
    from elastic.snapshot.reader import SnapshotCatalog

Storage = Annotated[
    str | None, typer.Option("--storage", help="DIR or s3://BUCKET/PREFIX; default: that of the run on this machine.")
]
RunName = Annotated[str | None, typer.Option("--run", help="Not needed where the storage holds only one.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
WHICH = "A step, an id or the beginning of one, or 'latest'."


@dataclass(frozen=True, slots=True)
class Found:
    """A run in a store. ``refs`` are its committed snapshots, newest first."""

    store: BlobStore
    run: str
    catalog: SnapshotCatalog
    refs: list[SnapshotRef]

    def one(self, which: str) -> SnapshotRef:
        """The snapshot that ``which`` names. Raises ConfigError if there is none, or more than one."""
        if which == "latest" and self.refs:
            return self.refs[0]
        if which.isdecimal():
            matches = [ref for ref in self.refs if ref.step == int(which)][:1]
        else:
            exact = [ref for ref in self.refs if which in (ref.snapshot_id, ref.directory)]
            begun = [ref for ref in self.refs if which and ref.snapshot_id.startswith(which)]
            matches = exact or begun
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise ConfigError("STEP|ID", which, f"say more of it: {listing(ref.snapshot_id for ref in matches)}")
        for directory, reason in self.catalog.quarantined.items():
            if which.isdecimal() and directory.startswith(f"{int(which):012d}-"):
                raise CorruptSnapshot(f"the only snapshot of step {which} is damaged: {reason}", directory)
        raise ConfigError("STEP|ID", which, f"run {self.run!r} has {self._steps()}")

    def _steps(self) -> str:
        if not self.refs:
            return "no committed snapshot"
        steps = sorted({ref.step for ref in self.refs}, reverse=True)
        more = f" and {len(steps) - 8} older ones" if len(steps) > 8 else ""
        return f"snapshots of step {', '.join(map(str, steps[:8]))}{more}"


def find(storage: str | None, run: str | None) -> Found:
    """The run in the storage. Raises ConfigError if it is not clear which, ClusterError if it is not there."""
    from elastic.snapshot.reader import SnapshotCatalog

    url = absolute(storage) if storage else announced_storage(run)
    store = open_store(url)
    if run is None:
        names = runs_held(store)
        if len(names) != 1:
            cure = f"it holds {listing(names, 20)}; name one with --run" if names else "it holds none"
            raise ConfigError("--run", None, f"say which run of {store.url}: {cure}")
        run = names[0]
    check_part(run)
    catalog = SnapshotCatalog(store, run)
    refs = catalog.list()
    if not refs and not catalog.quarantined and not store.exists(f"{run}/run.json"):
        raise ClusterError(f"there is no run {run!r} in {store.url}", "check the name and the storage")
    return Found(store, run, catalog, refs)


def announced_storage(run: str | None) -> str:
    """Where the run under way on this machine is stored. Raises ConfigError if there is none."""
    for record in local_runs():
        if run in (None, record.run):
            return record.storage
    raise ConfigError("--storage", None, "name the directory or s3://BUCKET/PREFIX that holds the run")


def runs_held(store: BlobStore) -> list[str]:
    """The names of all runs in the store, sorted: also of those that were imported or lost their ``run.json``."""
    keys = (key.split("/", 2) for key in store.list("") if "/" in key)
    return sorted({parts[0] for parts in keys if parts[1] in ("run.json", "snapshots")})


def pinned_directories(store: BlobStore, run: str) -> set[str]:
    """Directories of the snapshots that someone pinned."""
    return {key.rpartition("/")[2] for key in store.list(pins_prefix(run))}
