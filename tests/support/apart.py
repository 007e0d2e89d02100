"""A Ray cluster whose worker nodes each have a network of their own: see ``network``.

The driver is a process of its own, since the one that runs the tests may be connected to another cluster.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from support.cluster import JOBS, STORE_BYTES, WORKER_CPUS, until, when
from support.network import Network, network

import elastic
from actors.names import NAMESPACE
from actors.node_store import arena_path
from elastic.observe.audit import RunAudit, audit_run
from elastic.storage.blob_store import open_store

START_S = 120.0
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": f"{START_S:g}"}


class Apart:
    """``nodes``: the address of each worker node, and its id."""

    def __init__(self, net: Network, pool: ProcessPoolExecutor, log: Path) -> None:
        self.network, self._pool, self._log = net, pool, log
        self._starters: list[subprocess.Popen[bytes]] = []
        self.nodes: dict[str, str] = {}

    def begin(self, count: int) -> None:
        """Start the head and ``count`` nodes, one after the other: all choose names in one directory."""
        head = self.call(_start_head, self.network.address)
        for _ in range(count):
            self._start_node(head, self.network.add())
            self.nodes = until(self._up, START_S, "a node to come up")

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function`` of a module returns in the driver."""
        return self._pool.submit(function, *arguments).result()

    def start(self, name: str, storage: Path, config: dict[str, Any], **fields: Any) -> RunApart:
        """``jobs.train`` under way on this cluster."""
        self.call(_start_run, name, str(storage), config, fields)
        return RunApart(self, name, str(storage))

    def address_of(self, node: str) -> str:
        """Where the node with this id is."""
        return next(address for address, name in self.nodes.items() if name == node)

    def actors(self, address: str) -> set[int]:
        """The processes of ranks and stores on that node."""
        found = set()
        for pid in self.network.processes(address):
            with contextlib.suppress(psutil.NoSuchProcess):
                if " ".join(psutil.Process(pid).cmdline()).startswith(("ray::Rank", "ray::NodeStore")):
                    found.add(pid)
        return found

    def close(self) -> None:
        """End the runs, the head, and what started the nodes; their processes end with the network."""
        try:
            with contextlib.suppress(BrokenProcessPool):  # with a driver that died its head has ended
                self.call(_end)
        finally:
            for node in self._starters:
                node.kill()
                node.wait()

    def _start_node(self, head: str, address: str) -> None:
        ray_command = str(Path(sys.executable).with_name("ray"))
        begin = [ray_command, "start", "--block", "--address", head, "--node-ip-address", address]
        size = ["--num-cpus", str(WORKER_CPUS), "--object-store-memory", str(STORE_BYTES)]
        command = self.network.inside(address, *begin, *size)
        with self._log.open("ab") as log:
            self._starters.append(
                subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=subprocess.STDOUT)
            )

    def _up(self) -> dict[str, str] | None:
        assert all(node.poll() is None for node in self._starters), self._log.read_text()
        found: dict[str, str] = self.call(_nodes)
        return found if len(found) == len(self._starters) else None


class RunApart:
    """The handle of a run of the driver."""

    def __init__(self, apart: Apart, name: str, storage: str) -> None:
        self.name, self.storage, self._apart = name, storage, apart

    def status(self) -> dict[str, Any]:
        """See RunHandle."""
        found: dict[str, Any] = self._apart.call(_status, self.name)
        return found

    def when(self, condition: Callable[[dict[str, Any]], Any], deadline_s: float, what: str) -> dict[str, Any]:
        """See ``support.cluster.when``."""
        return when(self, condition, deadline_s, what)

    def stop(self) -> elastic.Result:
        """End it at its next boundary."""
        found: elastic.Result = self._apart.call(_stop, self.name)
        return found

    def audit(self) -> RunAudit:
        """Of the run that has ended."""
        found = audit_run(open_store(self.storage), self.name)
        assert found is not None
        return found


@contextlib.contextmanager
def apart(directory: Path, count: int) -> Iterator[Apart]:
    """A head without CPUs in this machine's own network, and ``count`` nodes of one CPU, for the block."""
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network())
        pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"), _begin_driver))
        made = Apart(net, pool, directory / "nodes")
        stack.callback(made.close)
        made.begin(count)
        yield made


# --- what the driver does ----------------------------------------------------------------------------------------

_clusters: list[Cluster] = []
_runs: dict[str, Any] = {}


def _begin_driver() -> None:
    os.environ.update(ENVIRONMENT)


def _start_head(address: str) -> str:
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False, "node_ip_address": address}
    _clusters.append(Cluster(initialize_head=True, head_node_args=head))
    ray.init(address=_clusters[0].address, namespace=NAMESPACE, log_to_driver=False)
    return str(_clusters[0].address)


def _nodes() -> dict[str, str]:
    return {n["NodeManagerAddress"]: n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0)}


def _start_run(name: str, storage: str, config: dict[str, Any], fields: dict[str, Any]) -> None:
    _runs[name] = elastic.ElasticTrainer(
        f"{JOBS}:train",
        train_loop_config=config,
        scaling_config=elastic.ScalingConfig(num_workers=fields.pop("workers")),
        run_config=elastic.RunConfig(name=name, storage_path=storage, **fields),
    ).start()


def _status(name: str) -> dict[str, Any]:
    found: dict[str, Any] = _runs[name].status()
    return found


def _stop(name: str) -> elastic.Result:
    _runs[name].stop()
    found: elastic.Result = _runs[name].wait()
    return found


def _end() -> None:
    for run in _runs.values():
        run.abandon()
    if _runs:
        for run, node in itertools.product(_runs, _nodes().values()):
            shutil.rmtree(arena_path("/dev/shm", run, node), ignore_errors=True)
    ray.shutdown()
    for cluster in _clusters:
        cluster.shutdown()
