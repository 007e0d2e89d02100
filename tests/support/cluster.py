"""Several raylets on one machine, and the ways in which they die."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from actors.names import NAMESPACE
from actors.node_store import arena_path
from elastic.observe.audit import audit_run
from elastic.storage.blob_store import open_store

JOBS = str(Path(__file__).parent.parent / "cluster" / "jobs.py")
"""Train functions for cluster tests."""

STORE_BYTES = 100 << 20
WORKER_CPUS = 1


class TestCluster:
    """A head without CPUs, where controllers live, and worker nodes of one CPU each."""

    __test__ = False

    def __init__(self, nodes: int) -> None:
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: dict[str, Any] = {}
        for _ in range(nodes):
            self.add_node()
        ray.init(address=self.cluster.address, namespace=NAMESPACE, log_to_driver=False)

    def add_node(self, **labels: str) -> str:
        """Start a worker node; its id."""
        node = self.cluster.add_node(
            num_cpus=WORKER_CPUS, object_store_memory=STORE_BYTES, labels=labels or None, wait=False
        )
        self.nodes[node.node_id] = node
        return str(node.node_id)

    def kill_node(self, node_id: str, run: str, arena_directory: str = "/dev/shm") -> float:
        """SIGKILL the raylet and everything it started, and take its memory away; the moment it was done."""
        node = self.nodes.pop(node_id)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        doomed = [raylet, *raylet.children(recursive=True)]
        at = time.monotonic()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        # The node's memory dies with it; on one shared machine it would stay.
        shutil.rmtree(arena_path(arena_directory, run, node_id), ignore_errors=True)
        return at

    def process(self, title: str, node: str = "") -> psutil.Process:
        """The one process whose title begins so, on ``node`` or on the head."""
        of = self.nodes[node] if node else self.cluster.head_node
        found = []
        for process in psutil.Process(of.all_processes["raylet"][0].process.pid).children():
            with contextlib.suppress(psutil.Error):
                found += [process] if " ".join(process.cmdline()).startswith(title) else []
        (process,) = found
        return process

    def ensure(self, nodes: int) -> None:
        """Bring the number of worker nodes back to ``nodes``."""
        while len(self.nodes) < nodes:
            self.add_node()
        until(lambda: self.alive() >= nodes, 30, "the nodes to come up")

    def alive(self) -> int:
        """Living nodes with CPUs, as Ray sees them."""
        return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())

    def close(self) -> None:
        """End everything."""
        ray.shutdown()
        self.cluster.shutdown()


@contextlib.contextmanager
def test_cluster(nodes: int) -> Iterator[TestCluster]:
    """A cluster for the block."""
    cluster = TestCluster(nodes)
    try:
        yield cluster
    finally:
        cluster.close()


test_cluster.__test__ = False  # type: ignore[attr-defined]


def until(condition: Callable[[], Any], deadline_s: float, what: str) -> Any:
    """The first true value of ``condition``; AssertionError when it has not come in time."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {deadline_s:g} s for {what}")


def when(handle: Any, condition: Callable[[dict[str, Any]], Any], deadline_s: float, what: str) -> dict[str, Any]:
    """The first status of the run for which ``condition`` holds. Fails at once if the run ended otherwise."""
    last: dict[str, Any] = {}

    def check() -> dict[str, Any] | None:
        last.clear()
        last.update(handle.status())
        if condition(last):
            return dict(last)
        assert last["result"] is None, f"the run ended while waiting for {what}: {last['result']}"
        return None

    try:
        return until(check, deadline_s, what)
    except AssertionError:
        seen = {key: last.get(key) for key in ("phase", "generation", "world_size", "step", "alarms", "members")}
        raise AssertionError(f"waited {deadline_s:g} s for {what}; the run stood at {seen}") from None


def assert_audited(result: Any) -> None:
    """Without an error at the end, and every sample once."""
    assert result.error is None
    found = audit_run(open_store(result.storage), result.run)
    assert found is not None
    assert (found.audit.repeated, found.audit.skipped, found.audit.faults) == (0, 0, ())


def kill_process(pid: int) -> float:
    """SIGKILL; the moment it was done."""
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()
