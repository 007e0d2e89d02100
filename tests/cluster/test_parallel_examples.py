"""Each example of a sharded model, on one mesh and then, from its snapshot, on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cluster import TestCluster, when

import elastic
from elastic.mesh import Mesh
from elastic.resume_check.check import recovery_check
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.blob_store import open_store

EXAMPLES = Path(__file__).parents[2] / "examples"

MESHES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "fsdp2": ({"dp": 3}, {"dp": 2}),
    "fsdp2_tensor_parallel": ({"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}),
    "pipeline": ({"dp": 1, "pp": 2}, {"dp": 1, "pp": 4}),
    "experts": ({"ep": 2}, {"ep": 3}),
    "context_parallel": ({"dp": 1, "cp": 2}, {"dp": 2, "cp": 2}),
}

CHECKED = ("fsdp2_tensor_parallel", "pipeline")
"""Those whose snapshots are also put to the recovery check: all axes of sharding, and microbatches."""


def test_every_example_is_run() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    assert found == {*MESHES, "minimal"}


@pytest.mark.parametrize("name", MESHES)
def test_the_example_learns_and_goes_on_on_another_mesh(cluster: TestCluster, tmp_path: Path, name: str) -> None:
    cluster.ensure(4)
    losses: list[list[Any]] = []
    for mesh, steps in zip(MESHES[name], (30, 60)):
        ranks = 1
        for size in mesh.values():
            ranks *= size
        result = elastic.ElasticTrainer(
            f"{EXAMPLES}/{name}.py:train",
            train_loop_config={"steps": steps},
            scaling_config=elastic.ScalingConfig(num_workers=ranks, mesh=mesh),
            run_config=elastic.RunConfig(name=name, storage_path=str(tmp_path)),
        ).fit()
        assert result.error is None
        assert (result.status, result.step) == ("finished", steps)
        losses.append([row["loss"] for row in result.metrics])
    assert result.generations[0].restored_step == 30
    first, last = (sum(part) / 10 for part in (losses[0][:10], losses[1][-10:]))
    assert last < 0.9 * first
    if name in CHECKED:
        check_resume(tmp_path, name)


def check_resume(storage: Path, name: str) -> None:
    """``elastic snapshots verify --resume``: the last snapshot on its own mesh, and on the one before it."""
    store = open_store(str(storage))
    saved = SnapshotCatalog(store, name).find(60)
    assert saved is not None
    other, target = Mesh(tuple(MESHES[name][0].items())), f"{EXAMPLES}/{name}.py:train"
    report = recovery_check(store, name, saved, target, meshes=[other], steps=1)
    assert [check for check in report.checks if check.ok is False] == []
    made = {check.what for check in report.checks if check.ok and str(other) in check.where}
    assert made >= {
        "parameters and optimizer state",
        "sample ids",
        "loss",
        "gradient norm",
        "next update",
        "generators",
    }


LOSES_RANK_0 = """
import os
import runpy
import signal

import elastic

def train(config):
    run = elastic.current_run()
    report = run.report
    def report_or_die(**metrics):
        if (run.generation, run.rank, run.step) == (1, 0, 12):
            os.kill(os.getpid(), signal.SIGKILL)
        report(**metrics)
    run.report = report_or_die
    runpy.run_path(config["example"])["train"](config)
"""


def test_a_sharded_run_that_loses_its_first_rank_shrinks_and_grows_back(cluster: TestCluster, tmp_path: Path) -> None:
    """The survivor is rank 1 of two, rank 0 of one, and rank 0 of two: of the same mesh in another place."""
    cluster.ensure(2)
    script = tmp_path / "job.py"
    script.write_text(LOSES_RANK_0)
    handle = elastic.ElasticTrainer(
        f"{script}:train",
        train_loop_config={"steps": 1_000_000, "example": f"{EXAMPLES}/fsdp2.py"},
        scaling_config=elastic.ScalingConfig(num_workers=(1, 2)),
        run_config=elastic.RunConfig(
            name="sharded", storage_path=str(tmp_path), snapshots=elastic.SnapshotConfig(interval="5 steps")
        ),
    ).start()
    status = when(handle, lambda s: s["generation"] == 3 and s["phase"] == "running", 90, "two ranks again")
    when(handle, lambda s: s["step"] >= status["step"] + 5, 60, "5 steps more")
    handle.stop()
    result = handle.wait()
    assert result.error is None
    assert [generation.world_size for generation in result.generations] == [2, 1, 2]
    (incident,) = result.incidents
    assert (incident.rung, incident.restored_from) == ("shrink", "node")
    grown = next(snapshot for snapshot in result.snapshots if snapshot.purpose == "grow")
    assert result.generations[2].restored_step == grown.step
