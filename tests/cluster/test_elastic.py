"""Fewer ranks and more again: nothing repeated, nothing skipped, the same learning curve."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import ray
from support.cluster import JOBS, TestCluster, until, when

import elastic
from elastic.data.ledger import Audit
from elastic.observe.audit import audit_run
from elastic.storage.blob_store import open_store

EPOCH = 2048
BATCH = 32
STEPS = EPOCH // BATCH
TOLERANCE = 1e-4
"""Relative difference of the loss that another summation order may bring on this model; no dropout."""


def audited(storage: str, run: str) -> Audit:
    found = audit_run(open_store(storage), run)
    assert found is not None
    return found.audit


def asked_for(cluster: TestCluster) -> Any:
    """What Ray's autoscaler would read, if there were one."""
    asked = ray._raylet.GcsClient(address=cluster.cluster.address).internal_kv_get(b"autoscaler_resource_request", None)
    return json.loads(asked or b"[]")


@pytest.fixture(scope="module")
def quiet(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    cluster.ensure(4)
    return elastic.ElasticTrainer(
        f"{JOBS}:train",
        train_loop_config={"samples": EPOCH, "batch": BATCH, "epochs": 1, "dropout": 0.0},
        scaling_config=elastic.ScalingConfig(num_workers=4),
        run_config=elastic.RunConfig(name="quiet", storage_path=str(tmp_path_factory.mktemp("quiet"))),
    ).fit()


def test_four_three_four_ranks_see_every_sample_of_the_epoch_once(
    cluster: TestCluster, trainer: Any, quiet: Any
) -> None:
    cluster.ensure(4)
    config = {"samples": EPOCH, "batch": BATCH, "epochs": 1, "dropout": 0.0, "step_s": 0.25}
    failures = {"probe_timeout_s": 10.0}
    handle = trainer(name="elastic", config=config, workers=(2, 4), interval=1.0, failures=failures).start()
    status = when(handle, lambda s: s["step"] >= 12 and s["snapshots"] >= 2, 60, "step 12")
    victim = sorted(status["members"].items())[-1][1]["node"]
    killed_at = cluster.kill_node(victim, "elastic")
    when(handle, lambda s: s["world_size"] == 3 and s["incidents"], 20, "three ranks")
    until(lambda: asked_for(cluster) == [{"CPU": 1.0}] * 4, 10, "the autoscaler to be asked for a fourth")
    cluster.add_node()
    when(handle, lambda s: s["world_size"] == 4 and s["phase"] == "running", 40, "four ranks")
    until(lambda: asked_for(cluster) == [], 10, "the request to be taken back")
    result = handle.wait()

    assert result.error is None
    assert killed_at > 0
    assert [generation.world_size for generation in result.generations] == [4, 3, 4]
    (incident,) = result.incidents
    assert (incident.kind, incident.rung) == ("node", "shrink")
    assert incident.rto_s <= 4.0
    assert incident.split["detect_s"] < 3.0, "the raylet's port tells it before any limit is over"
    assert (incident.restored_from, incident.steps_lost) == ("live", 0), incident.not_live
    assert math.isclose(sum(incident.split.values()), incident.rto_s, abs_tol=1e-6)
    grow = next(snapshot for snapshot in result.snapshots if snapshot.purpose == "grow")
    assert result.generations[2].restored_step == grow.step, "growing loses no step"

    found = audited(result.storage, "elastic")
    assert (found.steps, found.samples) == (STEPS, EPOCH)
    assert (found.repeated, found.skipped, found.faults) == (0, 0, ())
    ours = [row["loss"] for row in result.metrics]
    theirs = [row["loss"] for row in quiet.metrics]
    assert len(ours) == len(theirs) == STEPS
    assert all(math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in zip(ours, theirs, strict=True))


def test_a_rank_killed_with_fewer_allowed_goes_on_within_two_seconds(cluster: TestCluster, trainer: Any) -> None:
    cluster.ensure(4)
    config = {"steps": 60, "step_s": 0.05, "faults": [("kill", 20, 1, 1)]}
    result = trainer(name="shrink", config=config, workers=(2, 4), interval="5 steps").fit()
    (incident,) = result.incidents
    assert incident.rung == "shrink"
    assert incident.new_world_size == 3
    assert incident.rto_s <= 2.0
    assert (incident.restored_from, incident.steps_lost) == ("live", 0), incident.not_live
    assert result.step == 60


def test_a_resize_loses_no_step(cluster: TestCluster, trainer: Any) -> None:
    cluster.ensure(4)
    handle = trainer(name="resize", config={"steps": 120, "step_s": 0.1}, workers=(2, 4), interval=30.0).start()
    when(handle, lambda s: s["step"] >= 10, 60, "step 10")
    assert handle.resize(2) == 2
    when(handle, lambda s: s["world_size"] == 2 and s["phase"] == "running", 30, "two ranks")
    assert handle.resize(9) == 4, "the run's own limits hold"
    when(handle, lambda s: s["world_size"] == 4 and s["phase"] == "running", 60, "four ranks")
    result = handle.wait()
    assert [generation.world_size for generation in result.generations] == [4, 2, 4]
    assert result.steps_lost == 0
    steps = [row["step"] for row in result.metrics]
    assert steps == list(range(1, 121))
    assert audited(result.storage, "resize").faults == ()


def test_a_stop_leaves_a_durable_snapshot_and_the_same_name_resumes(cluster: TestCluster, trainer: Any) -> None:
    cluster.ensure(4)
    handle = trainer(name="stopped", config={"steps": 40, "step_s": 0.1}, interval=60.0).start()
    when(handle, lambda s: s["step"] >= 8, 60, "step 8")
    handle.stop()
    first = handle.wait()
    assert (first.status, first.error) == ("stopped", None)
    assert 8 <= first.step < 40
    second = trainer(name="stopped", config={"steps": 40}).fit()
    assert second.generations[0].restored_step == first.step
    assert second.generations[0].generation > first.generations[-1].generation
    assert (second.status, second.step) == ("finished", 40)
    found = audited(second.storage, "stopped")
    assert (found.steps, found.faults) == (40, ())


def test_with_several_meshes_allowed_a_lost_rank_leads_to_the_largest_that_is_left_and_spares_are_named(
    cluster: TestCluster, tmp_path: Path
) -> None:
    cluster.ensure(4)
    result = elastic.ElasticTrainer(
        f"{JOBS}:train",
        train_loop_config={"steps": 40, "step_s": 0.02, "faults": [("kill", 20, 3, 1)]},
        scaling_config=elastic.ScalingConfig(num_workers=(2, 4), mesh=[{"dp": 2, "tp": 2}, {"dp": 2}]),
        run_config=elastic.RunConfig(name="meshes", storage_path=str(tmp_path)),
    ).fit()
    assert [generation.mesh for generation in result.generations][:2] == ["dp2·tp2", "dp2"]
    assert result.generations[1].reason == (
        "dp2 takes 2 of 3 ready ranks, 1 stays spare: the next larger mesh, dp2·tp2, needs 4"
    )
    assert (result.step, result.incidents[0].steps_lost) == (40, 0)
    assert audited(result.storage, "meshes").faults == ()
