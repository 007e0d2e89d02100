"""What a controller is told once, for the whole run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.entry import EntryPoint
from elastic.config import RunConfig, ScalingConfig
from elastic.protocol.run_state import Limits


@dataclass(frozen=True, slots=True)
class ControllerSpec:
    """The user's configuration, the train function with its config, and Ray's environment for the run's processes."""

    scaling: ScalingConfig
    run: RunConfig
    entry: EntryPoint
    config: Any
    runtime_env: dict[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """What the driver knows of the versions that snapshots are made with: what the user named, the code."""

    @property
    def limits(self) -> Limits:
        """The part of the configuration that decides in the lifecycle."""
        scaling, failures = self.scaling, self.run.failures
        return Limits(
            mesh=scaling.mesh,
            min_workers=scaling.min_workers,
            max_workers=scaling.max_workers,
            hot_spares=scaling.hot_spares,
            replicas=self.run.snapshots.replicas,
            max_failures_without_progress=failures.max_failures_without_progress,
            budgets=failures.all_budgets,
            seed=self.run.seed,
            unwind_timeout_s=failures.unwind_timeout_s,
            form_timeout_s=failures.form_timeout_s,
            wait_for_workers_s=failures.wait_for_workers_s,
            wait_for_cluster_s=failures.wait_for_cluster_s,
        )
