"""Runs on an object store for real, and on one that goes away."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.cluster import TestCluster, when
from support.seaweed import seaweed

from elastic.cli.snapshots_find import Found
from elastic.cli.snapshots_show import trace_lines, trace_of
from elastic.errors import StorageError
from elastic.observe.audit import audit_run
from elastic.observe.history import journal_records
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.blob_store import open_store


def test_a_run_on_an_object_store_that_goes_away_trains_on_and_resumes_when_it_is_back(
    cluster: TestCluster, trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.ensure(4)
    url = "s3://runs/jobs"
    with seaweed(tmp_path / "server") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        first = trainer(
            name="on-s3",
            config={"step_s": 0.1},
            workers=2,
            storage=url,
            interval="10 steps",
            upload_bytes_per_s=64 << 10,
            env=server.env,
        )
        handle = first.start()
        when(
            handle, lambda s: (s["snapshot_remote_step"] or 0) >= 10 and s["uploading"], 60, "an upload after the first"
        )
        os.kill(server.pid, 9)
        at = handle.status()["step"]
        when(handle, lambda s: s["step"] >= at + 10, 60, "10 more steps without storage")
        handle.stop()
        result = handle.wait()
        reached = result.step
        assert reached >= at + 10
        assert result.status == "failed", "what could not be made durable is not called finished"
        assert isinstance(result.error, Exception)
    with seaweed(tmp_path / "server") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        config = {"steps": reached + 10}
        second = trainer(name="on-s3", config=config, workers=2, storage=url, env=server.env).fit()
        assert second.generations[0].restored_from == "remote"
        assert second.generations[0].restored_step >= 10
        assert second.step == reached + 10
        found = audit_run(open_store(url), "on-s3")
        assert found is not None
        assert (found.audit.steps, found.audit.repeated, found.audit.skipped) == (reached + 10, 0, 0)
        assert SnapshotCatalog(open_store(url), "on-s3").newest_good() is not None


def test_a_bucket_that_does_not_exist_is_one_sentence(cluster: TestCluster, trainer: Any, tmp_path: Path) -> None:
    cluster.ensure(4)
    with seaweed(tmp_path / "server") as server, pytest.raises(StorageError) as told:
        trainer(name="nowhere", storage="s3://no-such-bucket/x", workers=1, env=server.env).fit()
    assert "no-such-bucket" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_synchronous_snapshot_is_durable_before_the_next_step(
    cluster: TestCluster, trainer: Any, tmp_path: Path
) -> None:
    cluster.ensure(4)
    result = trainer(
        name="sync",
        config={"steps": 12, "step_s": 0.3},
        workers=2,
        interval="4 steps",
        synchronous=True,
        keep="keep_last(1) | best(1, 'loss')",
        upload_bytes_per_s=4 << 20,
        weights_every=1,
        keep_weights=2,
    ).fit()
    assert result.error is None
    periodic = [snapshot for snapshot in result.snapshots if snapshot.purpose == "periodic"]
    assert periodic
    assert periodic[0].step >= 4
    assert all(snapshot.remote and snapshot.upload_s > 0 for snapshot in result.snapshots)
    assert {"capture", "copy", "hash", "replicate", "upload", "commit"} <= set(periodic[0].parts_s)
    assert periodic[0].written_bytes > 0

    store = open_store(result.storage)
    catalog = SnapshotCatalog(store, "sync")
    kept = {ref.step: catalog.manifest(ref) for ref in catalog.list()}
    best_step = min((row["loss"], row["step"]) for row in result.metrics if row["step"] in kept)[1]
    assert {12, best_step} == set(kept), "the newest and the one with the smallest loss"
    losses = {row["step"]: row["loss"] for row in result.metrics}
    assert all(manifest.metrics["loss"] == losses[step] for step, manifest in kept.items())

    weights = SnapshotCatalog(store, "sync.weights")
    assert 1 <= len(weights.list()) <= 2
    newest = weights.list()[0]
    assert not any(weights.manifest(newest).has.values())
    alone, whole = weights.load(newest), catalog.load(catalog.list()[0])
    assert newest.step == 12
    assert set(alone) == {name for name in whole if name.startswith("model.")}
    assert all((alone[name] == whole[name]).all() for name in alone)

    told = [record for record in journal_records(store, "sync") if record["kind"] in ("snapshot", "durable")]
    assert {record["attempt"] for record in told if record["kind"] == "snapshot"} == {
        record["attempt"] for record in told if record["kind"] == "durable"
    }
    ref = catalog.list()[0]
    trace = trace_of(Found(store, "sync", catalog, catalog.list()), ref)
    assert {"capture", "copy", "hash", "replicate", "upload", "commit"} <= set(trace["parts_s"])
    stall, drain = trace_lines(trace)
    assert stall.startswith("  stall of training: ")
    assert drain.startswith("  beside training: ")
