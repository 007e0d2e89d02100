"""The ranks of one mesh in a recovery check: ``python -m elastic.resume_check.rank SPEC``. The answers lie beside it.

One fresh process imports what all of them need, which takes longer than their steps, and each rank is a fork of it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic._siblings import sibling
from elastic.config import VERSIONS_ACCEPTED, RestoreConfig
from elastic.errors import ConfigError
from elastic.mesh import Mesh
from elastic.resume_check.probed_run import ProbedRun, ProbeGate
from elastic.run import Stopped
from elastic.run_context import BUILD_STEP, RunContext
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.restore import ChunkSource, RestoreReport
from elastic.snapshot.rng import seed_everything
from elastic.storage.blob_store import open_store
from elastic.train_function import call_train_function, set_current_run

FIRST_USED = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")
"""What sharded models and the first step of an optimizer import: seconds of each rank, if it were not here already."""
LAST_WORDS_S = 0.2
"""Of a rank whose peer has failed: the one that failed first is rarely the one that is seen first."""


class _Link:
    """Restores the snapshot of the check; there is nobody to tell anything."""

    def __init__(self, catalog: SnapshotCatalog, directory: str) -> None:
        self._catalog, self._directory = catalog, directory

    def restore_source(self) -> tuple[SnapshotIndex, ChunkSource, str] | None:
        ref = next(ref for ref in self._catalog.list() if ref.directory == self._directory)
        return self._catalog.open(ref), self._catalog.source(ref), "remote"

    def restored(self, report: RestoreReport) -> None: ...
    def formed_state(self, share_bytes: int, step: int) -> None: ...
    def first_step(self, step: int) -> None: ...
    def at_end(self, step: int) -> None: ...
    def staged(self, share: Any) -> None: ...
    def stage_failed(self, attempt: str, reason: str) -> None: ...

    def doubtful(self, step: int) -> None:
        raise ConfigError("train function", step, "its turn ended without a step of an optimizer: nothing to compare")


def check(spec: dict[str, Any], rank: int, directory: Path) -> dict[str, Any]:
    """Take the steps; what was seen."""
    mesh = Mesh(tuple((name, size) for name, size in spec["mesh"]))
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(mesh.world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(mesh.world_size))
    function = sibling("actors.entry").load_function(spec["target"])
    store = dist.FileStore(str(directory / "rendezvous"), mesh.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh.world_size)
    context = RunContext(
        spec["run"],
        0,
        rank,
        mesh,
        spec["seed"],
        spec["rng"],
        "derive",
        restore=RestoreConfig(accept_versions=VERSIONS_ACCEPTED),
    )
    gate = ProbeGate()
    link = _Link(SnapshotCatalog(open_store(spec["storage"]), spec["run"]), spec["snapshot"])
    run = ProbedRun(context, link, gate, spec["steps"], directory)
    set_current_run(run)
    seed_everything(spec["seed"], BUILD_STEP, {})
    try:
        call_train_function(function, spec["config"])
        run.check_attached()
    except Stopped:
        pass
    contract = getattr(function, "error_contract", None)
    return {**run.notes, "coordinate": run.coordinate, "contract": _fields(contract)}


def _fields(contract: Any) -> dict[str, float] | None:
    return {name: getattr(contract, name) for name in contract.__slots__} if contract is not None else None


def take_part(place: Path, spec: dict[str, Any], rank: int) -> int:
    """0, or 1 where the train function raised; either way the answer is written."""
    try:
        answer = check(spec, rank, place.parent)
        done = 0
    except BaseException as error:  # whatever the user's code raises is the answer
        text = f"{type(error).__name__}: {error}"
        answer = {"error": text, "kind": type(error).__name__, "traceback": traceback.format_exc()}
        done = 1
    (place.parent / f"answer-{rank}.json").write_text(json.dumps(answer))
    return done


def main(path: str) -> int:
    """0 if all ranks have answered; 1 as soon as one has failed, since the others wait for it in vain."""
    place = Path(path)
    spec = json.loads(place.read_text())
    for module in FIRST_USED:
        importlib.import_module(module)
    left = {_start(place, spec, rank) for rank in range(math.prod(size for _, size in spec["mesh"]))}
    while left:
        ended, status = os.wait()
        left.discard(ended)
        if status and left:
            time.sleep(LAST_WORDS_S)
            for rank in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            return 1
    return 0


def _start(place: Path, spec: dict[str, Any], rank: int) -> int:
    """The process of a rank."""
    if process := os.fork():
        return process
    done = 1
    try:
        with (place.parent / f"stderr-{rank}").open("wb") as errors:
            os.dup2(errors.fileno(), 2)
        done = take_part(place, spec, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        # Peers may still be inside of a collective with this rank; nothing here is worth an orderly end of threads.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(done)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
