"""Starts the controller of a run and holds on to it; finds the controller of a run that is under way."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from actors.adoption import end_all_of, stores_of
from actors.cluster_view import head_pin
from actors.controller import ControllerActor
from actors.controller_spec import ControllerSpec
from actors.entry import EntryPoint
from actors.names import NAMESPACE, controller_name
from actors.watch import kill
from elastic.config import RunConfig, ScalingConfig
from elastic.errors import ClusterError, ElasticError, InternalError
from elastic.observe.prints import Line, decode_line
from elastic.result import Result
from elastic.snapshot.made_with import code_of
from elastic.storage.blob_store import open_store

log = logging.getLogger("elastic.launch")

STOP_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 10.0
START_TIMEOUT_S = 180.0
"""The environment of a node that sees our code for the first time is made within it."""


class RunHandle:
    """One run, from outside. Every call raises ClusterError if the controller does not answer."""

    def __init__(self, name: str, controller: Any) -> None:
        self.name, self.controller = name, controller
        self._result = controller.result.remote()

    def status(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """The run now; see Chronicle.status."""
        found: dict[str, Any] = self._ask(self.controller.status.remote(), timeout_s)
        return found

    def resize(self, workers: int) -> int:
        """Want so many ranks from now on; returns what is wanted within the run's limits."""
        wanted: int = self._ask(self.controller.resize.remote(workers))
        return wanted

    def prints(self, cursors: dict[str, dict[str, int]]) -> list[Line]:
        """Lines that ranks printed after ``cursors`` (by node; changed in place), read from the nodes' stores; those of
        a node that is lost are lost with it."""
        calls = {name: store.read_prints.remote(cursors.get(name, {})) for name, store in stores_of(self.name).items()}
        found: list[Line] = []
        for name, call in calls.items():
            with contextlib.suppress(RayError, GetTimeoutError):
                texts, cursors[name] = ray.get(call, timeout=ANSWER_TIMEOUT_S)
                found += [line for text in texts if (line := decode_line(text)) is not None]
        return found

    def decisions(self, after: float) -> list[tuple[float, str]]:
        """See Controller.decisions."""
        found: list[tuple[float, str]] = self._ask(self.controller.decisions.remote(after))
        return found

    def stop(self) -> None:
        """End the run at its next boundary, with a durable snapshot."""
        self._ask(self.controller.stop.remote())

    def exclude(self, node: str, left_s: float | None = None) -> None:
        """Move off the node with this id at a boundary, and do not use it again."""
        self._ask(self.controller.exclude.remote(node, left_s))

    def readmit(self, node: str) -> None:
        """Use the node again."""
        self._ask(self.controller.readmit.remote(node))

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

    def abandon(self) -> None:
        """End every process of the run now, without a snapshot; what was committed stays."""
        kill(self.controller)
        with contextlib.suppress(RayError):
            end_all_of(self.name)

    def _ask(self, answer: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        try:
            return ray.get(answer, timeout=timeout_s)
        except (RayActorError, GetTimeoutError) as error:
            raise ClusterError(f"the controller of run {self.name!r} does not answer: {type(error).__name__}") from None
        except RayTaskError as error:
            raise InternalError(f"the controller of run {self.name!r} failed: {_last_line(error)}") from None


def launch(
    train_loop: Callable[..., Any] | str,
    config: Any,
    scaling: ScalingConfig,
    run: RunConfig,
    runtime_env: dict[str, Any] | None = None,
) -> RunHandle:
    """Start the controller and tell it to begin. Raises ClusterError if the run is already under way, ConfigError for
    a function or a storage that there is not."""
    open_store(run.storage_path)
    entry = EntryPoint(train_loop) if isinstance(train_loop, str) else EntryPoint(function=train_loop)
    if isinstance(train_loop, str):
        entry.load()
    if not ray.is_initialized():
        ray.init(namespace=NAMESPACE, include_dashboard=False, log_to_driver=False)
    runtime_env = {**(runtime_env or {}), **(run.worker_runtime_env or {})} or None
    spec = ControllerSpec(scaling, run, entry, config, runtime_env, {**code_of(entry.load()), **run.versions})
    try:
        controller = ControllerActor.options(
            name=controller_name(run.name),
            namespace=NAMESPACE,
            lifetime="detached",
            resources=head_pin(),
            runtime_env=runtime_env,
        ).remote(spec)
    except ValueError:
        handle = find(run.name)
        if handle.status()["result"] is None:
            raise ClusterError(
                f"run {run.name!r} is under way on this cluster",
                f"stop it first, or watch it: elastic status {run.name}",
            ) from None
        handle.close()
        return launch(train_loop, config, scaling, run, runtime_env)
    try:
        ray.get(controller.start.remote(), timeout=START_TIMEOUT_S)
    except RayTaskError as error:
        kill(controller)
        if isinstance(error.cause, ElasticError):
            raise error.cause from None
        raise ClusterError(f"the controller did not start: {_last_line(error)}") from None
    except RayError as error:
        kill(controller)
        raise ClusterError(f"the controller did not start: {_last_line(error)}") from None
    return RunHandle(run.name, controller)


def find(name: str) -> RunHandle:
    """The run of that name on the cluster that Ray is connected to. Raises ClusterError if there is none."""
    try:
        return RunHandle(name, ray.get_actor(controller_name(name), namespace=NAMESPACE))
    except ValueError:
        raise ClusterError(
            f"no run {name!r} is under way on this cluster",
            "name the cluster with --address, look with --storage, or start it again",
        ) from None


def running() -> list[str]:
    """The names of all runs on the cluster that Ray is connected to, sorted."""
    before, _, after = controller_name("\0").partition("\0")
    return sorted(
        actor["name"].removeprefix(before).removesuffix(after)
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(before) and actor["name"].endswith(after)
    )


def _last_line(error: BaseException) -> str:
    """Ray puts a remote traceback into the text of its errors; what was raised stands last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
