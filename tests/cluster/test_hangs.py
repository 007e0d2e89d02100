"""Ranks that stand still are found, their stacks are saved, and the run goes on without a finished step lost."""

from __future__ import annotations

from typing import Any

from support.cluster import TestCluster

from elastic.result import IncidentReport, Result
from elastic.storage.blob_store import open_store

CONFIG = {"steps": 40, "step_s": 0.02}


def stacks_of(result: Result, incident: IncidentReport) -> str:
    return open_store(result.storage).get(f"{result.run}/{incident.stacks}").decode()


def test_a_stopped_rank_is_found_and_replaced_and_no_finished_step_is_lost(cluster: TestCluster, trainer: Any) -> None:
    cluster.ensure(4)
    config = {**CONFIG, "faults": [("stop", 20, 1, 1)]}
    result = trainer(name="stopped", config=config, workers=3, interval=1e3).fit()
    assert result.error is None
    (incident,) = result.incidents
    assert (incident.kind, incident.rung, incident.steps_lost) == ("hang", "replace", 0)
    assert incident.why.startswith("rank 1 hangs: its process is stopped")
    assert incident.split["detect_s"] >= 5.0
    text = stacks_of(result, incident)
    assert all(f"==== rank {rank}, " in text for rank in range(3))
    assert text.count('"train"') == 3


def test_a_rank_that_locks_up_in_its_own_code_is_told_from_those_that_wait_for_it(
    cluster: TestCluster, trainer: Any
) -> None:
    cluster.ensure(4)
    config = {**CONFIG, "early_faults": [("lock", 20, 2, 1)]}
    result = trainer(name="locked", config=config, workers=3, interval=1e3, failures={"hang_timeout_s": 4.0}).fit()
    assert result.error is None
    (incident,) = result.incidents
    assert (incident.kind, incident.steps_lost) == ("hang", 0)
    assert incident.why.startswith("rank 2 hangs: it stands in locks_up (")
    assert incident.split["detect_s"] >= 4.0
    assert "locks_up" in stacks_of(result, incident)


def test_a_slow_first_step_and_an_evaluation_are_no_hang_until_its_own_limit(
    cluster: TestCluster, trainer: Any
) -> None:
    cluster.ensure(4)
    evaluations = [(5, 7.0, None), (8, 600.0, 4.0)]
    config = {"steps": 12, "first_s": 5.0, "evaluations": evaluations}
    result = trainer("evaluates", name="evaluates", config=config, workers=3, failures={"hang_timeout_s": 3.0}).fit()
    assert (result.status, result.step) == ("finished", 12)
    (incident,) = result.incidents
    assert incident.why.startswith("rank 0 hangs: it stands in the evaluation after step 8")
