"""The trajectory after a failure is the trajectory without it: same mesh, bitwise."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cluster import TestCluster, when

from elastic.data.ledger import decode_row
from elastic.errors import ConfigError
from elastic.journal import PREFIX, decode
from elastic.observe.audit import audit_run
from elastic.result import Result
from elastic.storage.blob_store import open_store

CONFIG = {"steps": 40, "dropout": 0.2, "step_s": 0.02}


def rows(result: Result) -> dict[tuple[int, int], tuple[int, int, str]]:
    """What each data rank consumed at each step, by the latest generation that took the step."""
    store = open_store(result.storage)
    found: dict[tuple[int, int], tuple[int, Any]] = {}
    for key in store.list(f"{result.run}/{PREFIX}"):
        for record in decode(store.get(key), key):
            for text in record.get("ledger", ()):
                row = decode_row(text)
                place = (row.step, row.rank)
                if place not in found or row.generation >= found[place][0]:
                    found[place] = (row.generation, (row.start, row.stop, row.digest))
    return {place: value for place, (_, value) in sorted(found.items())}


def assert_same(result: Result, reference: Result) -> None:
    ours, theirs = result.load_state(), reference.load_state()
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()]
    assert different == []
    # A rank that dies takes the rows of its last steps along; what its peers kept proves that the steps were done.
    assert len(rows(reference)) == 160
    assert rows(result).items() <= rows(reference).items()
    found = audit_run(open_store(result.storage), result.run)
    assert found is not None
    assert (found.audit.steps, found.audit.repeated, found.audit.skipped) == (40, 0, 0)
    assert found.audit.attested == 8 * (160 - len(rows(result)))


@pytest.fixture(scope="module")
def reference(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run that nothing happens to."""
    from support.cluster import JOBS

    import elastic

    cluster.ensure(4)
    return elastic.ElasticTrainer(
        f"{JOBS}:train",
        train_loop_config=CONFIG,
        scaling_config=elastic.ScalingConfig(num_workers=4),
        run_config=elastic.RunConfig(name="reference", storage_path=str(tmp_path_factory.mktemp("reference"))),
    ).fit()


def test_a_rank_killed_in_step_23_and_replaced_changes_no_bit(
    cluster: TestCluster, trainer: Any, reference: Result
) -> None:
    cluster.ensure(4)
    config = {**CONFIG, "faults": [("kill", 23, 2, 1)]}
    result = trainer(name="rank-kill", config=config, interval="7 steps").fit()
    (incident,) = result.incidents
    assert (incident.kind, incident.rung) == ("rank", "replace")
    assert_same(result, reference)


def test_a_node_killed_and_replaced_changes_no_bit(cluster: TestCluster, trainer: Any, reference: Result) -> None:
    cluster.ensure(4)
    handle = trainer(name="node-kill", config={**CONFIG, "step_s": 0.1}, interval="7 steps").start()
    status = when(handle, lambda s: s["step"] >= 23, 60, "step 23")
    victim = sorted(status["members"].items())[-1][1]["node"]
    cluster.kill_node(victim, "node-kill")
    cluster.add_node()
    result = handle.wait()
    assert result.error is None
    (incident,) = result.incidents
    assert (incident.kind, incident.rung) == ("node", "replace")
    assert_same(result, reference)


def test_a_new_cluster_resumes_from_storage_alone_and_changes_no_bit(
    cluster: TestCluster, trainer: Any, reference: Result, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The first cluster is one that this test makes and kills whole, so it runs in a process of its own."""
    storage = str(tmp_path_factory.mktemp("thrown-away"))
    first = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("doomed_cluster.py")), storage],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert first.stdout is not None
    try:
        step = int(first.stdout.readline())
    finally:
        doomed = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        first.wait()
        first.stdout.close()
    for arena in Path("/dev/shm").glob("elastic-thrown-away-*"):
        shutil.rmtree(arena)  # a machine's memory dies with it
    assert step >= 23
    cluster.ensure(4)
    result = trainer(name="thrown-away", config=CONFIG, storage=storage).fit()
    assert result.generations[0].restored_from == "remote"
    assert 0 < result.generations[0].restored_step <= step
    assert result.generations[0].generation > 1
    assert_same(result, reference)


def test_a_step_that_failed_in_code_that_swallows_errors_does_not_count(cluster: TestCluster, trainer: Any) -> None:
    cluster.ensure(4)
    quiet = trainer("swallows", name="swallow-quiet", config={"steps": 40}, workers=3).fit()
    config = {"steps": 40, "faults": [("kill", 20, 1, 1)]}
    killed = trainer("swallows", name="swallow", config=config, workers=3).fit()
    assert [incident.kind for incident in killed.incidents] == ["rank"]
    ours, theirs = killed.load_state(), quiet.load_state()
    assert [name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()] == []


def test_saved_generators_bring_the_same_draws_back_and_need_the_same_mesh(cluster: TestCluster, trainer: Any) -> None:
    cluster.ensure(4)
    quiet = trainer(name="saved-quiet", config=CONFIG, workers=2, rng="saved").fit()
    config = {**CONFIG, "faults": [("kill", 23, 1, 1)]}
    killed = trainer(name="saved", config=config, workers=2, rng="saved", interval="7 steps").fit()
    (incident,) = killed.incidents
    assert "saved generator states" in incident.not_live
    ours, theirs = killed.load_state(), quiet.load_state()
    assert [name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()] == []
    with pytest.raises(ConfigError, match="rng='derived'"):
        trainer(name="saved", config={**CONFIG, "steps": 50}, workers=3, rng="saved").fit()
