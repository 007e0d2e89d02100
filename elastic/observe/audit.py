"""The audit of a whole run: every ledger row that its journal holds against the order that its loader stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic.data.ledger import Audit, LedgerRow, audit, decode_row
from elastic.data.loader_state import LoaderState
from elastic.errors import ClusterError
from elastic.observe.history import journal_records
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.tree import decode
from elastic.storage.blob_store import BlobStore

LOADER = "loader"


@dataclass(frozen=True, slots=True)
class RunAudit:
    """What was audited, up to which step, and what was found."""

    run: str
    step: int
    snapshot: str
    audit: Audit

    @property
    def clean(self) -> bool:
        """Every sample up to ``step`` was consumed exactly once."""
        return self.audit.clean

    def to_json(self) -> dict[str, Any]:
        """JSON-able values."""
        fields = {name: getattr(self.audit, name) for name in self.audit.__slots__}
        return {"clean": self.clean, "step": self.step, "snapshot": self.snapshot, **fields}


def audit_run(store: BlobStore, run: str) -> RunAudit | None:
    """Audit the run from its first step to its newest durable snapshot; None if it attached no loader.

    Raises ClusterError if there is no durable snapshot, CorruptSnapshot if the journal or the snapshot is damaged.
    """
    found = SnapshotCatalog(store, run).newest_good()
    if found is None:
        raise ClusterError(f"run {run!r} has no durable snapshot in {store.url}", "nothing can be audited before one")
    ref, index = found
    state = loader_state(index.objects.of(0))
    if state is None:
        return None
    rows: list[LedgerRow] = []
    generation = 0
    for record in journal_records(store, run):
        if record["kind"] == "begun":
            generation = max(generation, int(record["generation"]))
        elif record["kind"] == "committed":
            rows += [decode_row(row) for row in record["ledger"]]
    rows = [row for row in rows if row.step < ref.step]
    end = state.cursor if state.cursor < ref.step * state.global_batch_size else None
    result = audit(
        rows,
        state.order(),
        state.global_batch_size,
        first_step=0,
        last_step=ref.step - 1,
        end_position=end,
        last_generation=generation,
    )
    return RunAudit(run, ref.step, f"{ref.directory}/{ref.attempt}", result)


def loader_state(tree: bytes) -> LoaderState | None:
    """The state of the loader in a rank's objects, under whatever name it was attached; None if there is none."""
    for component in decode(tree)["components"].values():
        if component.get("kind") == LOADER and isinstance(component.get("state"), dict):
            return LoaderState.from_tree(component["state"])
    return None
