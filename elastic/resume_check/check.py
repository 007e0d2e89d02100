"""The recovery check of one snapshot: the next steps are taken from it in fresh processes, on several meshes."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic.data.ledger import LedgerRow, decode_row
from elastic.errors import ConfigError
from elastic.mesh import Mesh
from elastic.observe.history import journal_records
from elastic.resume_check.compare import Journal, ResumeReport, checks_of
from elastic.resume_check.contract import ErrorContract, another_mesh
from elastic.resume_check.worlds import run_world
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.blob_store import BlobStore

MOST_RANKS = 16
"""A mesh of more ranks is not tried on one machine unless it is named."""


def recovery_check(
    store: BlobStore,
    run: str,
    ref: SnapshotRef,
    target: str,
    *,
    config: Any = None,
    steps: int = 2,
    meshes: Sequence[Mesh] = (),
    tolerances: dict[str, float] | None = None,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> ResumeReport:
    """Restore ``ref`` into the train function ``target`` on the mesh that saved it, unless that is too large for one
    machine, and on ``meshes`` (default: one with another number of data-parallel ranks), take ``steps`` steps on each,
    and compare.

    Ranks are processes of this machine, with gloo on the CPU and one thread each. Raises TrainingFailed with the
    user's traceback, RestoreError where the snapshot cannot be taken up at all, ClusterError after ``timeout_s``.
    """
    catalog = SnapshotCatalog(store, run)
    index = catalog.open(ref)
    wanted = [index.mesh] if index.mesh.world_size <= MOST_RANKS else []
    wanted += [mesh for mesh in meshes or [another_mesh(index.mesh)] if mesh != index.mesh]
    if len(wanted) < 2 or max(mesh.world_size for mesh in wanted) > MOST_RANKS:
        raise ConfigError(
            "--mesh",
            ", ".join(map(str, meshes)) or None,
            f"the snapshot is of {index.mesh}, and ranks are processes of this machine: name meshes of at most "
            f"{MOST_RANKS} ranks{', two of them' if index.mesh.world_size > MOST_RANKS else ', others than its own'}",
        )
    own = json.loads(index.objects.of(0))["components"].get("run", {}).get("state", {})
    spec = {
        "target": target,
        "config": config,
        "storage": store.url,
        "run": run,
        "snapshot": ref.directory,
        "seed": int(own.get("seed", 0)),
        "rng": "saved" if own.get("generators") else "derived",
        "steps": steps,
    }
    with tempfile.TemporaryDirectory(prefix="elastic-check-") as place:
        worlds = []
        for number, mesh in enumerate(wanted):
            say(f"restoring step {ref.step} on {mesh} and taking {steps} steps from it")
            worlds.append(run_world(spec, mesh, Path(place) / f"world{number}", timeout_s))
        declared = worlds[0].answers[0].get("contract")
        contract = ErrorContract(**(declared or {})).changed(tolerances or {})
        checks = tuple(checks_of(catalog, ref, index, worlds, contract, _journal(store, run, ref.step, steps)))
    notes = worlds[0].answers[0]["restored"]["notes"]
    snapshot, tried = f"{ref.directory}/{ref.attempt}", tuple(str(mesh) for mesh in wanted)
    return ResumeReport(run, ref.step, snapshot, tried, contract, checks, tuple(notes))


def _journal(store: BlobStore, run: str, step: int, steps: int) -> Journal:
    """What the run told of its steps after ``step``; of those that were done twice, the later."""
    losses: dict[int, float] = {}
    rows: dict[int, dict[int, LedgerRow]] = defaultdict(dict)
    for record in journal_records(store, run, []):
        if record["kind"] == "metrics" and not record.get("rank"):  # the loss that is compared is rank 0's
            for finished, _, metrics in record["rows"]:
                if step < finished <= step + steps and "loss" in metrics:
                    losses[int(finished) - step - 1] = float(metrics["loss"])
        elif record["kind"] == "committed":
            for row in map(decode_row, record["ledger"]):
                if step <= row.step < step + steps:
                    before = next(iter(rows[row.step - step].values()), row)
                    if row.generation > before.generation:
                        rows[row.step - step].clear()
                    if row.generation >= before.generation:
                        rows[row.step - step][row.rank] = row
    return Journal(losses, {turn: list(found.values()) for turn, found in rows.items()})
