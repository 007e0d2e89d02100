"""A run that finds imported weights under its name begins with them, and with nothing else of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from elastic.config import RestoreConfig
from elastic.gate import BoundaryGate
from elastic.mesh import Mesh
from elastic.run import Run
from elastic.run_context import RunContext
from elastic.snapshot.foreign import weights_of
from elastic.snapshot.import_torch import open_torch_file
from elastic.snapshot.imports import import_weights
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.memory_blobs import MemoryBlobs


class Link:
    """Restores the only snapshot of a catalog; tells nobody."""

    def __init__(self, catalog: SnapshotCatalog) -> None:
        self.catalog = catalog

    def restore_source(self) -> Any:
        (ref,) = self.catalog.list()
        return self.catalog.open(ref), self.catalog.source(ref), "remote"

    def restored(self, report: Any) -> None: ...


def test_a_run_under_the_name_of_imported_weights_begins_with_them(tmp_path: Path) -> None:
    torch.manual_seed(5)
    trained = torch.nn.Linear(4, 3)
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    store = MemoryBlobs()
    weights = weights_of(open_torch_file(tmp_path / "weights.pt"), None)
    import_weights(store, "warm", weights, now_s=1.0, step=100)

    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    context = RunContext("warm", 1, 0, Mesh((("dp", 1),)), restore=RestoreConfig())
    run = Run(context, Link(SnapshotCatalog(store, "warm")), BoundaryGate())  # type: ignore[arg-type]
    report = run.attach(model=model, optimizer=optimizer)

    assert report is not None
    assert (report.mode, report.tier) == ("weights", "remote")
    assert torch.equal(model.weight, trained.weight)
    assert torch.equal(model.bias, trained.bias)
    assert not optimizer.state
    assert run.step == 100, "later snapshots are newer than the one that was imported"
