from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import JOBS, TestCluster

import elastic


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def cluster() -> Iterator[TestCluster]:
    """Four worker nodes, shared by the session; a test calls ``cluster.ensure(4)`` before it begins."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = TestCluster(4)
    yield made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """``trainer(job, name, config, workers, **snapshot_fields)``: an ElasticTrainer on this test's directory."""

    def make(
        job: str = "train",
        name: str = "run",
        config: dict[str, Any] | None = None,
        workers: int | tuple[int, int] = 4,
        storage: str = str(tmp_path),
        env: dict[str, str] | None = None,
        failures: dict[str, Any] | None = None,
        **snapshots: Any,
    ) -> elastic.ElasticTrainer:
        return elastic.ElasticTrainer(
            f"{JOBS}:{job}",
            train_loop_config=config or {},
            scaling_config=elastic.ScalingConfig(num_workers=workers),
            run_config=elastic.RunConfig(
                name=name,
                storage_path=storage,
                worker_runtime_env={"env_vars": env} if env else None,
                failures=elastic.FailureConfig(**(failures or {})),
                snapshots=elastic.SnapshotConfig(**({"interval": 1.0} | snapshots)),
            ),
        )

    return make
