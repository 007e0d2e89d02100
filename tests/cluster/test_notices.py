"""Word that nodes go away leads to one decision at a boundary, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from support.calling_off import calls_off_drains
from support.cluster import TestCluster, assert_audited, until, when

from actors import launch

PREEMPTION = 2


def drain(cluster: TestCluster, node: str, within_s: float) -> None:
    """What an autoscaler does before it takes a node away; Ray itself takes nothing away then."""
    gcs = ray._raylet.GcsClient(address=cluster.cluster.address)
    accepted, why = gcs.drain_node(node, PREEMPTION, "test", int((time.time() + within_s) * 1000))
    assert accepted, why


def nodes_of(status: dict[str, Any]) -> list[str]:
    return sorted(member["node"] for member in status["members"].values())


def clean(result: Any) -> None:
    """Nothing was lost, repeated or skipped."""
    assert_audited(result)
    assert (result.incidents, result.steps_lost) == ((), 0)


def test_signals_drains_and_exclusions_move_ranks_away_without_losing_a_step(
    cluster: TestCluster, trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.ensure(4)
    called_off = tmp_path / "called-off"
    options = {"num_cpus": 0, "max_concurrency": 64, "max_restarts": -1, "max_task_retries": -1}
    monkeypatch.setattr(launch, "ControllerActor", ray.remote(**options)(calls_off_drains(str(called_off))))
    handle = trainer(name="notices", config={"step_s": 0.05}, workers=(1, 4)).start()
    status = when(handle, lambda s: s["world_size"] == 4 and s["step"] >= 5, 60, "four ranks")

    taken_back, told, *drained = nodes_of(status)
    handle.exclude(taken_back)
    when(handle, lambda s: any(n["leaving"] for n in s["node_list"]), 10, "the exclusion")
    handle.readmit(taken_back)
    when(handle, lambda s: s["notices"], 10, "the end of the notice")
    drain(cluster, taken_back, 60.0)
    when(handle, lambda s: any(n["leaving"] for n in s["node_list"]), 10, "the drain")
    called_off.write_text(taken_back)
    status = when(handle, lambda s: len(s["notices"]) == 2, 10, "the end of the drain")
    (back,) = [n for n in status["node_list"] if n["node"] == taken_back]
    assert (back["leaving"], back["capacity"]) == ([], 1)
    assert ([n["purpose"] for n in status["notices"]], status["generation"]) == (["cancelled"] * 2, 1)

    process = cluster.process("ray::Rank", told)
    os.kill(process.pid, signal.SIGTERM)
    status = when(handle, lambda s: len(s["notices"]) == 3, 30, "the move off the node")
    assert (status["world_size"], status["generation"]) == (3, 2)
    assert told not in nodes_of(status)
    until(lambda: not process.is_running(), 10, "the process that was told to end")
    handle.readmit(told)
    status = when(handle, lambda s: s["world_size"] == 4 and s["phase"] == "running", 40, "the node to be used again")
    generation = status["generation"]

    for node in drained:
        drain(cluster, node, 60.0)
        time.sleep(0.7)  # what is tested is that they come apart
    status = when(handle, lambda s: len(s["notices"]) == 4, 40, "the move off both nodes")
    assert (status["world_size"], status["generation"]) == (2, generation + 1), "staggered drains are one decision"
    assert not {*drained} & {*nodes_of(status)}

    assert status["alarms"] == []
    handle.exclude(told, 0.1)
    status = when(handle, lambda s: len(s["notices"]) == 5, 30, "the move off a node that goes at once")
    assert nodes_of(status) == [taken_back]
    assert "the snapshot of the boundary needs" in status["alarms"][0], "why it does not fit is told"
    handle.stop()
    result = handle.wait()
    for node in (taken_back, *drained):
        cluster.kill_node(node, "notices")

    clean(result)
    moved = result.notices[2:]
    assert [(n["by"], n["purpose"]) for n in moved] == [(by, "shrink") for by in ("sigterm", "drain", "exclude")]
    assert sorted(moved[1]["nodes"]) == sorted(drained)
    assert all(0 < n["out_s"] < 25 for n in moved), moved


def test_a_drain_without_another_place_waits_for_one_until_just_before_the_deadline(
    cluster: TestCluster, trainer: Any
) -> None:
    cluster.ensure(4)
    handle = trainer(name="no-place", config={"step_s": 0.05}, workers=4, interval=300.0).start()
    status = when(handle, lambda s: s["world_size"] == 4 and s["step"] >= 5, 60, "four ranks")
    doomed = nodes_of(status)[0]
    drain(cluster, doomed, 12.0)
    when(handle, lambda s: (s["snapshot_remote_step"] or 0) > 0, 12, "a durable snapshot at once")
    status = when(handle, lambda s: s["phase"] == "gathering", 20, "everybody out before the deadline")
    assert doomed not in nodes_of(status)
    cluster.kill_node(doomed, "no-place")
    cluster.add_node()
    when(handle, lambda s: s["phase"] == "running" and s["generation"] == 2, 40, "the run to go on")
    handle.stop()
    result = handle.wait()
    clean(result)
    assert [(n["by"], n["purpose"]) for n in result.notices] == [("drain", "leave")]
    assert result.notices[0]["out_s"] < 12
