"""The user surface, frozen: a name that appears or goes away is a decision, made here."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import elastic
from elastic import config

NAMES = {
    "Batch", "ElasticLoader", "ElasticTrainer", "ErrorContract", "FailureConfig", "Interrupted", "Mixture",
    "PackedDataset", "RestoreConfig", "Result", "Run", "RunConfig", "ScalingConfig", "SnapshotConfig", "TokenDataset",
    "current_run", "declare", "per_rank", "write_tokens",
}  # fmt: skip

FIELDS = {
    "ScalingConfig": {"num_workers", "resources_per_worker", "use_gpu", "hot_spares", "mesh"},
    "SnapshotConfig": {
        "interval", "mtbf_s", "replicas", "remote_every", "max_uploads_in_flight", "when_busy", "synchronous", "keep",
        "weights_every", "keep_weights", "upload_bytes_per_s", "checksum", "arena_directory", "rng", "rng_on_resize",
    },
    "FailureConfig": {
        "max_failures_without_progress", "max_user_errors", "unwind_timeout_s", "form_timeout_s", "wait_for_workers_s",
        "wait_for_cluster_s", "probe_timeout_s", "notice_s", "budgets", "heartbeat_timeout_s", "fence_timeout_s",
        "hang_timeout_s", "first_step_timeout_s", "loading_timeout_s", "straggler_factor", "straggler_window_s",
        "stragglers",
    },
    "RestoreConfig": {
        "mode", "accept_versions", "missing_weights", "unexpected_weights", "missing_optimizer", "unexpected_optimizer",
    },
    "RunConfig": {
        "name", "storage_path", "snapshots", "failures", "seed", "worker_runtime_env", "restore", "start_from",
        "versions",
    },
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert set(elastic.__all__) == NAMES
    assert set(elastic._HOME) == NAMES
    assert set(dir(elastic)) >= NAMES


def test_every_public_name_is_defined_where_it_is_said_to_be() -> None:
    root = Path(elastic.__file__).parent.parent
    for name, home in elastic._HOME.items():
        tree = ast.parse((root / (home.replace(".", "/") + ".py")).read_text())
        bound = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        bound |= {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom)
                  for alias in node.names}  # fmt: skip
        assert name in bound, f"{home} has no {name}"


def test_a_type_checker_sees_the_names_that_are_there_at_run_time() -> None:
    tree = ast.parse(inspect.getsource(elastic))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == elastic._HOME


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        elastic.Trainer  # noqa: B018


@pytest.mark.parametrize("name", FIELDS)
def test_the_fields_of_a_config_are_these(name: str) -> None:
    assert set(getattr(config, name).model_fields) == FIELDS[name]


@pytest.mark.parametrize("name", FIELDS)
def test_a_config_comes_through_its_public_name(name: str) -> None:
    assert getattr(elastic, name) is getattr(config, name)
