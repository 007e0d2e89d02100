"""A private cluster of several nodes on this machine, each with its own raylet: for what happens when one dies."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import ray
from ray.cluster_utils import Cluster

from actors.connection import QUIET
from actors.node_store import arena_path
from elastic.errors import ClusterError

OBJECT_STORE_BYTES = 96 << 20
"""Ray's own object store of each node; it carries replicas between nodes, the arenas lie elsewhere."""


class PrivateCluster:
    """A head without resources, and nodes that can be added and killed. ``close`` ends every process and gives back
    all memory; so does leaving the ``with`` block, however it is left."""

    def __init__(self, cpus_per_node: int, *, run: str, arena_directory: str) -> None:
        self._cpus, self._run, self._arena_directory = cpus_per_node, run, arena_directory
        base = "/tmp" if os.path.isdir("/tmp") else None  # the names of sockets below it may not be long
        self._directory = tempfile.mkdtemp(prefix="elastic-", dir=base)
        self._before = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = self._directory
        self._nodes: dict[str, Any] = {}
        self._seen: set[str] = set()
        self._cluster: Cluster | None = None

    def __enter__(self) -> PrivateCluster:
        try:
            with _quiet():
                self._cluster = Cluster(
                    initialize_head=True,
                    head_node_args={
                        "num_cpus": 0,
                        "object_store_memory": OBJECT_STORE_BYTES,
                        "include_dashboard": False,
                    },
                )
            ray.init(address=self.address, **QUIET)
        except Exception as error:  # whatever Ray could not do, nothing of it may stay
            self.close()
            raise ClusterError(f"the private cluster did not start: {error}", "see the text above") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where other processes of this machine reach it."""
        assert self._cluster is not None
        return str(self._cluster.address)

    def add_node(self) -> str:
        """Start one more node and wait until the cluster knows it. Returns its id."""
        assert self._cluster is not None
        with _quiet():
            node = self._cluster.add_node(num_cpus=self._cpus, object_store_memory=OBJECT_STORE_BYTES)
        self._nodes[node.node_id] = node
        self._seen.add(node.node_id)
        return str(node.node_id)

    def kill_node(self, node_id: str) -> int:
        """SIGKILL to the node's raylet and all its processes at once; its memory dies with it. Returns how many."""
        raylet = self._nodes.pop(node_id).all_processes["raylet"][0].process.pid
        victims = [raylet, *descendants(raylet)]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(arena_path(self._arena_directory, self._run, node_id), ignore_errors=True)
        return len(victims)

    def kill_rank(self, node_id: str) -> int:
        """SIGKILL to one rank on the node. Returns its process id."""
        raylet = self._nodes[node_id].all_processes["raylet"][0].process.pid
        for pid in descendants(raylet):
            if "ray::Rank" in command_of(pid):
                os.kill(pid, signal.SIGKILL)
                return pid
        raise ClusterError(f"node {node_id[:12]} has no rank", "it was lost before it could be killed")

    def close(self) -> None:
        """End everything; a second Ctrl-C does not get in between."""
        with _uninterrupted():
            ours = descendants(os.getpid())
            with contextlib.suppress(Exception):
                ray.shutdown()
            if self._cluster is not None:
                with contextlib.suppress(Exception), _quiet():
                    self._cluster.shutdown()
            end_all(ours)
            for node_id in self._seen:
                shutil.rmtree(arena_path(self._arena_directory, self._run, node_id), ignore_errors=True)
            shutil.rmtree(self._directory, ignore_errors=True)
            if self._before is None:
                os.environ.pop("RAY_TMPDIR", None)
            else:
                os.environ["RAY_TMPDIR"] = self._before


def descendants(pid: int) -> list[int]:
    """Process ids of all children of ``pid`` and theirs."""
    import psutil  # Ray brings it along

    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def command_of(pid: int) -> str:
    """The command line of a process; empty if it is gone."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def end_all(pids: list[int], timeout_s: float = 3.0) -> None:
    """Wait a little for these processes of ours, then kill what is left. What has ended is no error."""
    import psutil

    left = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            left.append(psutil.Process(pid))
    _, left = psutil.wait_procs(left, timeout=timeout_s)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=timeout_s)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray speaks of every node that it starts and stops."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
