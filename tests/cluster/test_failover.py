"""The controller is killed at each phase of its protocol: training goes on, nothing is lost, doubled or left over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray
from support.cluster import TestCluster, kill_process, until, when
from support.doomed_controller import doomed

from actors import launch
from actors.adoption import actors_of
from actors.names import NAMESPACE, controller_name, member_name
from elastic.observe.audit import audit_run
from elastic.observe.history import journal_records
from elastic.storage.blob_store import open_store

STEPS = 60


def check(result: Any, run: str, *, generations: int = 1) -> None:
    """Finished, every step told once, every sample once, taken over once, and nothing left."""
    assert result.error is None
    assert result.status == "finished"
    assert [row["step"] for row in result.metrics] == list(range(1, STEPS + 1))
    assert [report.generation for report in result.generations] == list(range(1, generations + 1))
    store = open_store(result.storage)
    found = audit_run(store, run)
    assert found is not None
    assert found.step == STEPS
    assert found.clean, found.audit.faults
    assert sum(record["kind"] == "adopted" for record in journal_records(store, run)) == 1
    until(lambda: not actors_of(run), 10, "the actors of the run to end")


def steps_while_away(trace: Path, killed_at: float, storage: str, run: str) -> int:
    """How many steps were finished between the kill and the moment that the next controller took office."""
    (back_at,) = [record["t"] for record in journal_records(open_store(storage), run) if record["kind"] == "adopted"]
    return sum(killed_at < float(line) < back_at for line in trace.read_text().split())


def test_training_does_not_notice_that_the_controller_is_killed(
    cluster: TestCluster, trainer: Any, tmp_path: Path
) -> None:
    cluster.ensure(4)
    trace = tmp_path / "trace"
    config = {"steps": STEPS, "step_s": 0.08, "trace": str(trace)}
    handle = trainer(name="quiet-kill", config=config, workers=2, interval=60.0).start()
    when(handle, lambda s: s["step"] >= 5, 60, "step 5")
    killed_at = time.time()
    kill_process(cluster.process("ray::Controller").pid)
    assert handle.status(90.0)["generation"] == 1, "whoever asks meanwhile is answered by the successor"
    result = handle.wait()
    check(result, "quiet-kill")
    assert not result.incidents
    assert steps_while_away(trace, killed_at, result.storage, "quiet-kill") >= 3


@pytest.mark.parametrize(
    ("point", "after"),
    [
        ("after OpenSlots of periodic", 0),
        ("after Propose of periodic", 0),
        ("after Confirm of periodic", 0),
        ("after the commit of periodic is in the journal", 0),
        ("during an upload", 1),
        ("before BeginGeneration", 0),
        ("after BeginGeneration", 0),
        ("before MakeDurable", 0),
        ("before EndRun", 0),
    ],
)
def test_wherever_the_controller_is_killed_the_run_ends_as_if_nothing_had_happened(
    cluster: TestCluster, trainer: Any, monkeypatch: pytest.MonkeyPatch, point: str, after: int
) -> None:
    cluster.ensure(4)
    options = {"num_cpus": 0, "max_concurrency": 64, "max_restarts": -1, "max_task_retries": -1}
    monkeypatch.setattr(launch, "ControllerActor", ray.remote(**options)(doomed(point, after)))
    name = "at-" + "".join(c if c.isalnum() else "-" for c in point.lower())
    config = {"steps": STEPS, "step_s": 0.03}
    result = trainer(name=name, config=config, workers=2, interval="15 steps").fit()
    check(result, name)
    assert not result.incidents


def test_a_failure_while_there_is_no_controller_is_found_by_the_next_one(
    cluster: TestCluster, trainer: Any, tmp_path: Path
) -> None:
    cluster.ensure(4)
    config = {"steps": STEPS, "step_s": 0.05}
    handle = trainer(name="both-die", config=config, workers=2, interval="10 steps").start()
    when(handle, lambda s: s["step"] >= 15, 60, "step 15")
    # Rank 0: what it has reported since the journal was last written is known to the other one alone.
    records = list(journal_records(open_store(str(tmp_path)), "both-die"))
    (ranks,) = [record["ranks"] for record in records if record["kind"] == "begun"]
    rank = ray.get_actor(member_name("both-die", ranks[0]), namespace=NAMESPACE)
    kill_process(cluster.process("ray::Controller").pid)
    ray.kill(rank)
    result = handle.wait()
    check(result, "both-die", generations=2)
    (incident,) = result.incidents
    assert (incident.kind, incident.rung) == ("rank", "replace")


def test_a_stop_that_was_answered_is_not_forgotten(cluster: TestCluster, trainer: Any) -> None:
    cluster.ensure(4)
    handle = trainer(name="stopped", config={"step_s": 0.05}, workers=2, interval="1000 steps").start()
    when(handle, lambda s: s["step"] >= 5, 60, "step 5")
    controller = ray.get_actor(controller_name("stopped"), namespace=NAMESPACE)
    handle.stop()
    kill_process(cluster.process("ray::Controller").pid)
    result = handle.wait()
    assert (result.status, result.error) == ("stopped", None)
    assert controller is not None
    until(lambda: not actors_of("stopped"), 10, "the actors of the run to end")
