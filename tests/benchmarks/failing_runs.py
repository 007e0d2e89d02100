"""The toy job under either system on a private cluster of this machine, with a hand on its processes and nodes."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import toy_job
from step_log import Record, Recovery, StepLog, furthest, recovery

import elastic
from actors.local_cluster import PrivateCluster
from elastic.observe.audit import RunAudit, audit_run
from elastic.observe.history import journal_records
from elastic.storage.blob_store import open_store

RUN = "recovery-bench"
CLUSTER_TRIES = 3
START_S = 240.0
RECOVER_S = 240.0
"""Longer than any recovery that was ever seen; a run that has not gone on by then is an error."""
CLOSE_S = 20.0
MANY_STEPS = 1_000_000
"""More than any run here takes: it is ended from outside."""
Workers = int | tuple[int, int]


class Ours:
    """An ``elastic`` run with its defaults."""

    name = "ours"

    def __init__(self, storage: str, workers: Workers, config: dict[str, Any], spares: int = 0, **_: Any) -> None:
        self.storage = storage
        self._handle = elastic.ElasticTrainer(
            f"{toy_job.__file__}:ours",
            train_loop_config=config,
            scaling_config=elastic.ScalingConfig(num_workers=workers, hot_spares=spares),
            run_config=elastic.RunConfig(name=RUN, storage_path=storage),
        ).start()

    def ended(self, timeout_s: float = 0.0) -> str | None:
        """How the run ended, or None."""
        result = self._handle.poll(timeout_s)
        return result and f"{result.status}: {result.reason}"

    def incidents(self) -> int:
        """Failures that are over."""
        return len(self._handle.status()["incidents"])

    def warm(self) -> int:
        """Ranks that stand by."""
        return sum(member["phase"] == "warm" for member in self._handle.status()["members"].values())

    def stop(self) -> None:
        """End the run at its next boundary, so that its journal is whole."""
        self._handle.stop()
        self._handle.wait()

    def incident_records(self) -> list[dict[str, Any]]:
        """From the journal of the run that has ended."""
        records = journal_records(open_store(self.storage), RUN)
        return [record["incident"] for record in records if record["kind"] == "incident"]

    def audit(self) -> RunAudit:
        """Of the run that has ended."""
        found = audit_run(open_store(self.storage), RUN)
        assert found is not None
        return found


class RayTrain:
    """A ``TorchTrainer`` (V2) with its defaults, but for the number of failures that it bears and, where the
    configuration of the job says so, the seconds between two looks for new nodes."""

    name = "ray_train"

    def __init__(
        self, storage: str, workers: Workers, config: dict[str, Any], max_failures: int = 10, **_: Any
    ) -> None:
        from ray import train
        from ray.train.torch import TorchTrainer

        look_s = config.get("look_for_nodes_every_s")
        self._trainer = TorchTrainer(
            toy_job.ray_trains,
            train_loop_config=config,
            scaling_config=train.ScalingConfig(
                num_workers=workers, **({"elastic_resize_monitor_interval_s": look_s} if look_s else {})
            ),
            run_config=train.RunConfig(
                name=RUN, storage_path=storage, failure_config=train.FailureConfig(max_failures=max_failures)
            ),
        )
        self._outcome = ""
        self._over = threading.Event()
        threading.Thread(target=self._fit, name="fit", daemon=True).start()

    def _fit(self) -> None:
        try:
            self._trainer.fit()
            self._outcome = "finished"
        except Exception as error:  # whatever it is, it is how the run ended
            self._outcome = f"{type(error).__name__}: {error}"
        self._over.set()

    def ended(self, timeout_s: float = 0.0) -> str | None:
        """How the run ended, or None."""
        return self._outcome if self._over.wait(timeout_s) else None

    def close(self) -> None:
        """End a run that goes on: a thread that still asks Ray while it shuts down takes the whole process along."""
        end = time.monotonic() + CLOSE_S
        while not self._over.wait(0.2) and time.monotonic() < end:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "TrainController" in " ".join(process.cmdline()):
                        process.kill()


SYSTEMS: dict[str, Any] = {system.name: system for system in (Ours, RayTrain)}


class FailingRun:
    """One run of ``system`` on a cluster of its own."""

    def __init__(self, cluster: PrivateCluster, nodes: list[str], system: Any, log: StepLog) -> None:
        self.cluster, self.system, self.log = cluster, system, log
        self.nodes = nodes

    def until(self, condition: Callable[[], Any], deadline_s: float, what: str) -> Any:
        """The first true value of ``condition``; RuntimeError if the run ends before, or it has not come in time."""
        end = time.monotonic() + deadline_s
        while not (value := condition()):
            if how := self.system.ended(0.02):
                raise RuntimeError(f"{self.system.name} ended while waiting for {what}: {how}")
            if time.monotonic() > end:
                raise RuntimeError(f"{self.system.name}: waited {deadline_s:g} s for {what}")
        return value

    def goes_on_until(self, at: float) -> None:
        """It is ``at``; RuntimeError if the run ends before."""
        while (left := at - time.monotonic()) > 0:
            if how := self.system.ended(left):
                raise RuntimeError(f"{self.system.name} ended early: {how}")

    def until_step(self, step: int) -> None:
        """``step`` steps are finished."""
        self.until(lambda: furthest(self.log.read()) >= step, START_S, f"step {step}")

    def until_recovered(self, event_at: float) -> Recovery:
        """The first step after the event is finished."""
        found: Recovery = self.until(lambda: recovery(self.log.read(), event_at), RECOVER_S, "the next step")
        return found

    def ranks(self) -> list[Record]:
        """The newest word of each rank of the newest attempt whose process still lives, by rank."""
        records = self.log.read()
        newest = records[-1].attempt if records else 0.0
        last = {record.rank: record for record in records if record.attempt == newest}
        return [last[rank] for rank in sorted(last) if lives(last[rank].pid)]

    def kill_rank(self, pid: int) -> float:
        """SIGKILL; when."""
        at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return at

    def kill_node(self, node: str) -> float:
        """SIGKILL to the raylet and all its processes, its memory dies with it; when."""
        at = time.monotonic()
        self.cluster.kill_node(node)
        self.nodes.remove(node)
        return at

    def add_node(self) -> float:
        """When the cluster knew it."""
        self.nodes.append(self.cluster.add_node())
        at = time.monotonic()
        end_on_sigterm()
        return at


def lives(pid: int) -> bool:
    """Whether the process is there and not only its name."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def start_cluster(nodes: int, stack: contextlib.ExitStack) -> tuple[PrivateCluster, list[str]]:
    """A cluster that ends with ``stack``, and the ids of its nodes. Ray gives each process so many seconds to start;
    where a busy machine needs more, everything of that cluster is ended and the next one started."""
    arenas = elastic.SnapshotConfig().arena_directory
    for left in reversed(range(CLUSTER_TRIES)):
        with contextlib.ExitStack() as trial:
            try:
                cluster = trial.enter_context(PrivateCluster(1, run=RUN, arena_directory=arenas))
                started = [cluster.add_node() for _ in range(nodes)]
            except Exception as error:  # Ray raises bare ones
                if not left:
                    raise
                say(f"a cluster did not start and is tried again: {error}")
                continue
            stack.push(trial.pop_all())
            return cluster, started
    raise AssertionError("unreachable")


@contextlib.contextmanager
def failing_run(
    system: str, nodes: int, workers: Workers, config: Mapping[str, Any], **limits: int
) -> Iterator[FailingRun]:
    """A run under ``system`` on ``nodes`` nodes of one CPU each; every process and file of it ends with the block.

    ``config`` goes to the job; ``limits`` may hold ``spares`` (ours) and ``max_failures`` (Ray Train's)."""
    directory = Path(tempfile.mkdtemp(prefix="failing-run-"))
    log = directory / "steps.jsonl"
    try:
        # What Ray prints of processes that die is no news here, and stdout is for the answer.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
            cluster, started = start_cluster(nodes, stack)
            end_on_sigterm()
            told = {"log": str(log), "steps": MANY_STEPS, **config}
            run = SYSTEMS[system](str(directory / "storage"), workers, told, **limits)
            if isinstance(run, RayTrain):
                stack.callback(run.close)
            yield FailingRun(cluster, started, run, StepLog(log))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def end_on_sigterm() -> None:
    """SIGTERM ends the script as Ctrl-C does. Ray puts a handler of its own there with each node."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def prepare_process() -> None:
    """Settings of Ray that have to be made before it is used."""
    end_on_sigterm()
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """For an option of a script: names out of ``known``, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))} unknown; there are {', '.join(known)}")
        return names

    return parse


def say(text: str) -> None:
    """How far a long script has come."""
    print(text, file=sys.stderr, flush=True)


def timers(system: str) -> dict[str, float | str]:
    """What decides how soon it acts, as installed. Raises ImportError where Ray Train lacks something."""
    if system == "ours":
        failures = elastic.FailureConfig()
        return {
            name: getattr(failures, name) for name in type(failures).model_fields if name.endswith("_s")
        }  # or "auto"
    from ray import train
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as coordinator
    from ray.train.v2._internal import constants

    return {
        "health_check_interval_s": constants.DEFAULT_HEALTH_CHECK_INTERVAL_S,
        "worker_health_check_timeout_s": constants.DEFAULT_WORKER_HEALTH_CHECK_TIMEOUT_S,
        "worker_group_start_timeout_s": constants.DEFAULT_WORKER_GROUP_START_TIMEOUT_S,
        "elastic_resize_monitor_interval_s": train.ScalingConfig().elastic_resize_monitor_interval_s,
        "autoscaling_coordinator_tick_s": coordinator._AutoscalingCoordinatorActor.TICK_INTERVAL_S,
    }


def known_timers(systems: list[str]) -> dict[str, dict[str, float | str]]:
    """Of each system; ends the script with the cure where one cannot run here."""
    try:
        return {system: timers(system) for system in systems}
    except ImportError as error:
        raise SystemExit(f"Ray Train cannot run here ({error}): pip install 'ray[train]', or --systems ours") from None
