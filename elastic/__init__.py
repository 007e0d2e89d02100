"""Elastic, fault-tolerant PyTorch training on Ray.

Names are imported on first use, so that ``elastic tune`` needs neither Ray nor torch, and a worker that imports
``actors`` first meets no half-made package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Batch": "elastic.data.loader",
    "ElasticLoader": "elastic.data.loader",
    "ElasticTrainer": "elastic.trainer",
    "ErrorContract": "elastic.resume_check.contract",
    "FailureConfig": "elastic.config",
    "Interrupted": "elastic.run",
    "Mixture": "elastic.data.mixture",
    "PackedDataset": "elastic.data.packing",
    "RestoreConfig": "elastic.config",
    "Result": "elastic.result",
    "Run": "elastic.run",
    "RunConfig": "elastic.config",
    "ScalingConfig": "elastic.config",
    "SnapshotConfig": "elastic.config",
    "TokenDataset": "elastic.data.token_files",
    "current_run": "elastic.train_function",
    "per_rank": "elastic.snapshot.per_rank",
    "declare": "elastic.snapshot.declared",
    "write_tokens": "elastic.data.token_files",
}

__all__ = [
    "Batch",
    "ElasticLoader",
    "ElasticTrainer",
    "ErrorContract",
    "FailureConfig",
    "Interrupted",
    "Mixture",
    "PackedDataset",
    "RestoreConfig",
    "Result",
    "Run",
    "RunConfig",
    "ScalingConfig",
    "SnapshotConfig",
    "TokenDataset",
    "current_run",
    "declare",
    "per_rank",
    "write_tokens",
]

if TYPE_CHECKING:
    from elastic.config import FailureConfig, RestoreConfig, RunConfig, ScalingConfig, SnapshotConfig
    from elastic.data.loader import Batch, ElasticLoader
    from elastic.data.mixture import Mixture
    from elastic.data.packing import PackedDataset
    from elastic.data.token_files import TokenDataset, write_tokens
    from elastic.result import Result
    from elastic.resume_check.contract import ErrorContract
    from elastic.run import Interrupted, Run
    from elastic.snapshot.declared import declare
    from elastic.snapshot.per_rank import per_rank
    from elastic.train_function import current_run
    from elastic.trainer import ElasticTrainer


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'elastic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
