"""The command line on real clusters: run, watch, resize, stop, resume, interrupt; and what it refuses while it runs."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from support.cluster import JOBS, TestCluster
from support.command import arenas, run, started

from elastic.errors import ElasticError
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.blob_store import open_store


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's directory with a script in it; storage beside it."""
    directory = tmp_path / "project"
    directory.mkdir()
    shutil.copy(JOBS, directory / "jobs.py")
    return directory


def test_a_run_on_a_cluster_is_watched_resized_stopped_and_resumed(
    cluster: TestCluster, project: Path, tmp_path: Path
) -> None:
    cluster.ensure(2)
    storage, address = str(tmp_path / "store"), cluster.cluster.address
    begin = ["run", "jobs.py:train", "--name", "cli", "--workers", "1:2", "--storage", storage, "--address", address]
    with started(
        project, *begin, "--interval", "1s", "--set", "step_s=0.1", "--set", "steps=5000", "--json"
    ) as running:
        running.shows("generation 1: 2 ranks", 60)
        code, status = run(project, "status", "cli", "--address", address, "--json")
        assert (code, status.answer["live"], status.answer["world_size"]) == (0, True, 2)

        code, resized = run(project, "resize", "cli", "1", "--address", address, "--json")
        assert (code, resized.answer["wanted"]) == (0, 1)
        running.shows("generation 2: 1 rank ", 30)

        code, stopped = run(project, "stop", "cli", "--snapshot", "--address", address, "--json")
        assert (code, stopped.answer["status"]) == (0, "stopped")
        assert running.ends(30) == 0
        reached = running.answer["step"]
        assert reached == stopped.answer["step"] > 0

    code, stored = run(project, "status", "cli", "--address", address, "--storage", storage, "--json")
    assert code == 0
    assert stored.answer["durable"][0]["step"] == reached

    code, again = run(project, *begin, "--set", f"steps={reached + 3}", "--json")
    assert code == 0
    assert f"resumes from step {reached}" in again.shown
    assert again.answer["status"] == "finished"
    assert again.answer["step"] == reached + 3
    assert again.answer["generations"][0]["restored_step"] == reached


def test_another_port_of_the_cluster_is_refused_in_one_sentence(
    cluster: TestCluster, project: Path, tmp_path: Path
) -> None:
    node = ray.nodes()[0]
    raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    code, refused = run(project, "run", "jobs.py:train", "--storage", str(tmp_path / "store"), "--address", raylet)
    assert code == 6
    assert f"error: what listens at '{raylet}' is not the head of a cluster; use the port" in refused.shown


def test_a_run_outlives_the_terminal_that_began_it_and_is_watched_from_another(
    cluster: TestCluster, project: Path, tmp_path: Path
) -> None:
    cluster.ensure(2)
    storage, address = str(tmp_path / "store"), cluster.cluster.address
    begin = ["run", "jobs.py:train", "--name", "orphan", "--storage", storage, "--address", address]
    with started(project, *begin, "--set", "step_s=0.1") as running:
        running.shows("generation 1: 1 rank", 60)
        running.process.kill()
        running.process.wait()
        with started(project, "logs", "orphan", "-f", "--address", address) as logs:
            code, status = run(project, "status", "orphan", "--address", address, "--json")
            assert (code, status.answer["live"], status.answer["phase"]) == (0, True, "running")
            code, later = run(project, "status", "orphan", "--address", address, "--json")
            assert later.answer["step"] > status.answer["step"], "it trains on"
            code, stopped = run(project, "stop", "orphan", "--address", address, "--json")
            assert (code, stopped.answer["status"]) == (0, "stopped")
            assert logs.ends(30) == 0
            assert "generation 1" in logs.printed


def test_the_first_ctrl_c_stops_a_local_run_with_a_snapshot_and_leaves_nothing(project: Path, tmp_path: Path) -> None:
    storage = str(tmp_path / "store")
    with started(
        project, "run", "jobs.py:train", "--name", "local", "--storage", storage, "--set", "step_s=0.1", "--json"
    ) as running:
        running.shows("step ", 60)
        running.shows("loss", 60)
        running.interrupt()
        assert running.ends(30) == 130
        assert running.answer["status"] == "stopped"
        newest = SnapshotCatalog(open_store(storage), "local").list()[0]
        assert newest.step == running.answer["step"] > 0
        assert running.left() == []
    assert arenas("local") == []


def test_a_second_ctrl_c_leaves_at_once_and_leaves_nothing(project: Path, tmp_path: Path) -> None:
    with started(
        project,
        *["run", "jobs.py:train", "--name", "twice", "--storage", str(tmp_path / "store"), "--set", "step_s=30"],
    ) as running:
        running.shows("generation 1", 60)
        running.interrupt()
        running.shows("Ctrl-C again leaves at once", 10)
        running.interrupt()
        began = time.monotonic()
        assert running.ends(20) == 130
        assert time.monotonic() - began < 20
        assert running.left() == []
    assert arenas("twice") == []


@pytest.mark.parametrize(
    ("job", "exit_code", "sentence"),
    [
        ("raises", 93, "no such optimizer: adamm"),
        ("never_attaches", 2, "the train function never called run.attach"),
        ("attaches_a_lock", 4, "cannot save an object of type _thread.lock (lock['state']['lock'])"),
        ("attaches_what_has_no_state", 4, "it has no state_dict() and load_state_dict() (thing)"),
    ],
)
def test_a_train_function_that_cannot_be_run_ends_it_with_one_sentence(
    cluster: TestCluster, tmp_path: Path, job: str, exit_code: int, sentence: str
) -> None:
    cluster.ensure(1)
    error = _refused(_bad(job, "bad", tmp_path))
    assert error.exit_code == exit_code
    assert sentence in str(error).splitlines()[0]


def test_parts_of_a_model_that_nobody_declared_end_the_run_before_its_first_step(
    cluster: TestCluster, tmp_path: Path
) -> None:
    cluster.ensure(2)
    error = _refused(_bad("holds_a_layer_of_its_own", "undeclared", tmp_path, workers=2))
    assert error.exit_code == 4
    assert "do not hold the same tensors: rank 0: model.layer 0" in str(error)
    assert "say with elastic.declare" in str(error)
    assert SnapshotCatalog(open_store(str(tmp_path)), "undeclared").list() == []


def test_a_name_that_belongs_to_another_model_is_refused_and_its_snapshots_stay_readable(
    cluster: TestCluster, tmp_path: Path
) -> None:
    cluster.ensure(1)
    _bad("trains", "mine", tmp_path).fit()
    before = SnapshotCatalog(open_store(str(tmp_path)), "mine").list()
    error = _refused(_bad("trains_another_model", "mine", tmp_path))
    assert error.exit_code == 5
    assert "belongs to another model" in str(error)
    assert "model.weight is (1, 4) in the snapshot and (2, 4) here" in str(error)
    catalog = SnapshotCatalog(open_store(str(tmp_path)), "mine")
    assert catalog.list() == before
    good = catalog.newest_good()
    assert good is not None
    assert good[0].step == 3


def _bad(job: str, name: str, storage: Path, workers: int = 1) -> Any:
    import elastic

    return elastic.ElasticTrainer(
        f"{Path(__file__).parent / 'bad_jobs.py'}:{job}",
        scaling_config=elastic.ScalingConfig(num_workers=workers),
        run_config=elastic.RunConfig(name=name, storage_path=str(storage)),
    )


def _refused(trainer: Any) -> ElasticError:
    with pytest.raises(ElasticError) as refused:
        trainer.fit()
    return refused.value
