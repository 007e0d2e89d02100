"""A run that is started again, or from another one: in which mode, with which versions, and what it says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cluster import JOBS, TestCluster

import elastic
from elastic.errors import ConfigError, VersionMismatch
from elastic.result import Result


def fit(tmp_path: Path, steps: int, **run: Any) -> Result:
    return elastic.ElasticTrainer(
        f"{JOBS}:train",
        train_loop_config={"steps": steps, "dropout": 0.0},
        scaling_config=elastic.ScalingConfig(num_workers=2),
        run_config=elastic.RunConfig(storage_path=str(tmp_path), **{"name": "base"} | run),
    ).fit()


def test_versions_modes_and_a_start_from_another_run(cluster: TestCluster, tmp_path: Path) -> None:
    cluster.ensure(4)
    fit(tmp_path, 6, versions={"model": "v1"})
    with pytest.raises(VersionMismatch, match="model v1 → v2"):
        fit(tmp_path, 9, versions={"model": "v2"})
    accepted = fit(tmp_path, 9, versions={"model": "v2"}, restore={"accept_versions": ["model"]})
    (generation,) = accepted.generations
    assert (accepted.step, generation.restored_step) == (9, 6)
    assert "mode strict" in generation.restored_how
    assert "versions differ (accepted): model v1 → v2" in generation.restored_how
    assert "not compared: tokenizer" in generation.restored_how

    with pytest.raises(ConfigError, match="run 'base' has no snapshot '7'"):
        fit(tmp_path, 4, name="tuned", start_from="base@7", restore="weights")
    tuned = fit(tmp_path, 4, name="tuned", start_from="base", restore="weights")
    (generation,) = tuned.generations
    assert (tuned.step, generation.restored_step) == (4, 0)
    assert "mode weights" in generation.restored_how
    assert "optimizer" in generation.restored_how
    assert [row["step"] for row in tuned.metrics] == [1, 2, 3, 4]
    assert tuned.metrics[0]["loss"] < accepted.metrics[0]["loss"] * 1.5, "it begins with trained weights"
    again = fit(tmp_path, 6, name="tuned", start_from="base", restore="weights")
    assert again.generations[0].restored_step == 4, "the same command resumes the run itself"
    assert "mode strict" in again.generations[0].restored_how
