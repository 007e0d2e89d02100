"""Starts the controller of a run and holds on to it; finds the controller of a run that is under way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from actors.cluster_view import head_pin
from actors.controller import ControllerActor, ControllerSpec
from actors.entry import EntryPoint
from actors.names import NAMESPACE, controller_name
from actors.watch import kill
from elastic.config import RunConfig, ScalingConfig
from elastic.errors import ClusterError
from elastic.result import Result

log = logging.getLogger("elastic.launch")

STOP_TIMEOUT_S = 60.0


class RunHandle:
    """One run, from outside."""

    def __init__(self, name: str, controller: Any) -> None:
        self.name, self.controller = name, controller
        self._result = controller.result.remote()

    def status(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The run now; see Chronicle.status. Raises ClusterError if the controller does not answer."""
        try:
            found: dict[str, Any] = ray.get(self.controller.status.remote(), timeout=timeout_s)
            return found
        except (RayActorError, GetTimeoutError) as error:
            raise ClusterError(f"the controller of run {self.name!r} does not answer: {type(error).__name__}") from None

    def resize(self, workers: int) -> int:
        """Want so many ranks from now on; returns what is wanted within the run's limits."""
        wanted: int = ray.get(self.controller.resize.remote(workers))
        return wanted

    def stop(self) -> None:
        """End the run at its next boundary, with a durable snapshot."""
        ray.get(self.controller.stop.remote())

    def poll(self, timeout_s: float) -> Result | None:
        """The result, or None if the run has not ended within ``timeout_s``."""
        try:
            result: Result = ray.get(self._result, timeout=timeout_s)
        except GetTimeoutError:
            return None
        except RayActorError:
            raise ClusterError(
                f"the controller of run {self.name!r} died", "start the run again: it resumes from its last snapshot"
            ) from None
        return result

    def wait(self) -> Result:
        """The result when the run has ended. Interrupted, it stops the run at the next boundary and raises again."""
        try:
            while (result := self.poll(3600.0)) is None:
                pass
        except KeyboardInterrupt:
            self.stop()
            self.poll(STOP_TIMEOUT_S)
            self.close()
            raise
        self.close()
        return result

    def close(self) -> None:
        """Let go of the controller of a run that has ended."""
        kill(self.controller)


def launch(
    train_loop: Callable[..., Any] | str,
    config: Any,
    scaling: ScalingConfig,
    run: RunConfig,
    runtime_env: dict[str, Any] | None = None,
) -> RunHandle:
    """Start the controller and tell it to begin. Raises ClusterError if the run is already under way."""
    if not ray.is_initialized():
        ray.init(namespace=NAMESPACE, include_dashboard=False, log_to_driver=False)
    entry = EntryPoint(train_loop) if isinstance(train_loop, str) else EntryPoint(function=train_loop)
    if isinstance(train_loop, str):
        entry.load()
    spec = ControllerSpec(scaling, run, entry, config, runtime_env)
    try:
        controller = ControllerActor.options(
            name=controller_name(run.name),
            namespace=NAMESPACE,
            lifetime="detached",
            resources=head_pin(),
            runtime_env=runtime_env,
        ).remote(spec)
        ray.get(controller.start.remote())
    except ValueError:
        handle = find(run.name)
        if handle.status()["result"] is None:
            raise ClusterError(
                f"run {run.name!r} is under way on this cluster",
                f"stop it first, or watch it: elastic status {run.name}",
            ) from None
        handle.close()
        return launch(train_loop, config, scaling, run, runtime_env)
    except RayError as error:
        raise ClusterError(f"the controller did not start: {str(error).splitlines()[0]}") from None
    return RunHandle(run.name, controller)


def find(name: str) -> RunHandle:
    """The run of that name on the cluster that Ray is connected to. Raises ClusterError if there is none."""
    try:
        return RunHandle(name, ray.get_actor(controller_name(name), namespace=NAMESPACE))
    except ValueError:
        raise ClusterError(
            f"no run {name!r} is under way on this cluster", "name the cluster with --address, or start the run again"
        ) from None
