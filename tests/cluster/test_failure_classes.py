"""Each failure is told for what it was, with the rank that failed first and what it left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.cluster import TestCluster

from elastic.errors import DeterministicFailure


def test_exits_want_of_memory_kills_and_crashes_are_told_apart(cluster: TestCluster, trainer: Any) -> None:
    cluster.ensure(4)
    faults = [("exit", 6, 1, 1), ("memory", 12, 2, 2), ("kill", 18, 0, 3), ("crash", 24, 3, 4), ("raise", 28, 1, 5)]
    result = trainer(name="classes", config={"steps": 30, "early_faults": faults}, interval="5 steps").fit()
    assert result.error is None
    told = [(i.kind, i.failure_class, i.rank) for i in result.incidents]
    assert told == [
        ("rank", "user", 1),
        ("error", "out of memory", 2),
        ("rank", "infrastructure", 0),
        ("rank", "infrastructure", 3),
        ("error", "user", 1),
    ]
    exited, starved, killed, crashed, raised = result.incidents
    assert exited.why == "the process ended itself with exit code 3"
    assert "MemoryError: cannot allocate 8 GiB" in starved.traceback
    assert killed.why == "the process was killed"
    assert crashed.why == "the process crashed: SIGSEGV"
    assert "jobs.py" in crashed.traceback
    assert "ValueError: a bug at step 28" in raised.traceback
    assert all(incident.node for incident in result.incidents)


GROUPS = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").is_dir() else "/sys/fs/cgroup")


@pytest.mark.skipif(
    not (os.access(GROUPS, os.W_OK) and (GROUPS / "cgroup.procs").exists()), reason="no control group can be made here"
)
def test_a_rank_that_the_kernel_kills_for_want_of_memory_is_told_as_that(cluster: TestCluster, trainer: Any) -> None:
    cluster.ensure(4)
    config = {"steps": 20, "early_faults": [("hog", 10, 1, 1)]}
    result = trainer(name="hog", config=config, workers=2, interval="5 steps").fit()
    for group in GROUPS.glob("elastic-test-*"):
        group.rmdir()
    assert result.error is None
    (incident,) = result.incidents
    assert (incident.kind, incident.failure_class, incident.rank) == ("rank", "out of memory", 1)
    assert incident.why == "killed because memory ran out"
    assert incident.steps_lost == 0, incident


@pytest.mark.parametrize(("fault", "told"), [("exit", "exit code 3"), ("raise", "ValueError: a bug at step 6")])
def test_the_same_failure_at_the_same_step_twice_ends_the_run(
    cluster: TestCluster, trainer: Any, fault: str, told: str
) -> None:
    cluster.ensure(4)
    config = {"steps": 30, "early_faults": [(fault, 6, 1, None)]}
    result = trainer(name=f"always-{fault}", config=config, workers=2).start().wait()
    assert isinstance(result.error, DeterministicFailure)
    assert told in str(result.error)
    assert result.error.rank == 1
    assert ("jobs.py" in result.error.user_traceback) == (fault == "raise")
    assert len(result.generations) == 2
