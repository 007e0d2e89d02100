"""What a user starts. Imports the actors inside the call, so that ``import elastic`` needs neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic._siblings import sibling
from elastic.config import RunConfig, ScalingConfig
from elastic.errors import ConfigError
from elastic.result import Result

if TYPE_CHECKING:
    from actors.launch import RunHandle


class ElasticTrainer:
    """Runs a train function on an elastic set of Ray actors, to its end, through failures and resizes.

    ``train_loop_per_worker`` is called on every rank, again in each generation, with ``train_loop_config`` if that is
    given. Inside it ``elastic.current_run()`` gives the run. Arguments are named as in Ray Train.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any] | str,
        *,
        train_loop_config: Any = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig,
    ) -> None:
        if not callable(train_loop_per_worker) and not isinstance(train_loop_per_worker, str):
            raise ConfigError(
                "train_loop_per_worker",
                train_loop_per_worker,
                "pass a function, or its name as SCRIPT.py:function or package.module:function",
            )
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.scaling_config = scaling_config or ScalingConfig()
        self.run_config = run_config

    def start(self) -> RunHandle:
        """Begin the run, or resume it, and return a handle at once. Needs ``ray.init``; starts a local cluster if
        there is none."""
        launch = sibling("actors.launch")
        handle: RunHandle = launch.launch(
            self.train_loop_per_worker, self.train_loop_config, self.scaling_config, self.run_config
        )
        return handle

    def fit(self) -> Result:
        """Run to the end and return the result. The same name and storage again resumes from the newest snapshot.

        Raises the error of a failed run: TrainingFailed with the user's traceback, ClusterError, StorageError,
        ModelMismatch, ConfigError; what was committed stays readable. Interrupting the call stops the run at its next
        boundary, with a snapshot.
        """
        handle = self.start()
        result = handle.wait()
        if result.error is not None:
            raise result.error
        return result
