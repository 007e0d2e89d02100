"""Each failure is told for what it was, with the rank that failed first and what it left."""

from __future__ import annotations

from typing import Any

from support.cluster import TestCluster

from elastic.errors import DeterministicFailure


def test_exits_want_of_memory_kills_and_crashes_are_told_apart(cluster: TestCluster, trainer: Any) -> None:
    cluster.ensure(4)
    faults = [("exit", 6, 1, 1), ("memory", 12, 2, 2), ("kill", 18, 0, 3), ("crash", 24, 3, 4)]
    result = trainer(name="classes", config={"steps": 30, "early_faults": faults}, interval="5 steps").fit()
    assert result.error is None
    told = [(i.kind, i.failure_class, i.rank) for i in result.incidents]
    assert told == [
        ("rank", "user", 1),
        ("error", "out of memory", 2),
        ("rank", "infrastructure", 0),
        ("rank", "infrastructure", 3),
    ]
    exited, starved, killed, crashed = result.incidents
    assert exited.why == "the process ended itself with exit code 3"
    assert "MemoryError: cannot allocate 8 GiB" in starved.traceback
    assert killed.why == "the process was killed"
    assert crashed.why == "the process crashed: SIGSEGV"
    assert "jobs.py" in crashed.traceback
    assert all(incident.node for incident in result.incidents)


def test_the_same_exit_at_the_same_step_twice_ends_the_run(cluster: TestCluster, trainer: Any) -> None:
    cluster.ensure(4)
    faults = [("exit", 6, 1, None)]
    result = trainer(name="exits", config={"steps": 30, "early_faults": faults}, workers=2).start().wait()
    assert isinstance(result.error, DeterministicFailure)
    assert "exit code 3" in str(result.error)
    assert len(result.generations) == 2
