"""Memory besides the targets while a node restores, from a peer and from storage: its ranks, its store, Ray's share.

    python tests/benchmarks/restore_memory.py [--quick] [--json] [--mib 512] [--ranks 2]

Two raylets on this machine. The store of one node holds a snapshot in its memory and has uploaded it; on the other node
a store and ``--ranks`` ranks restore it, each of them all of it, through the real actors. The proportional set sizes of
the restoring node's processes (ranks, store, raylet: shared memory counts once) are read all the time.

``extra_bytes``: the most they grow over what they are before, when the targets are in place; the larger of ``peer`` and
``remote``. With ``--json`` one object on the last line.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_run import make_state, module_of

from actors.names import NAMESPACE, store_name
from actors.node_store import NodeStoreActor, StoreSpec, Upload
from actors.shares import StoreReader
from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot, RestoreOrder
from elastic.snapshot.capture import Attached
from elastic.snapshot.object_names import attempt_name, new_snapshot_id
from elastic.snapshot.restore import restore
from elastic.snapshot.staging import Stager, capture_and_stage

RUN, STEP = f"memory-{int(time.time())}", 1
HOLDER, READER = "holder", "reader"
ATTEMPT = attempt_name(1, 1)


def start_store(node: str, storage: str) -> Any:
    """The store of a node, as a run starts it."""
    # There is no controller here whose silence could mean anything.
    spec = StoreSpec(RUN, node, "/dev/shm", "xxh3_128", storage, fence_timeout_s=3600.0)
    options = {"name": store_name(RUN, node), "namespace": NAMESPACE, "resources": {node: 0.01}}
    store = NodeStoreActor.options(**options).remote(spec)
    ray.get(store.ping.remote())
    return store


def save(store: Any, shape: tuple[int, int], ranks: int) -> tuple[NodeSnapshot, RemoteSnapshot]:
    """Stage, seal, commit and upload a state that all ranks hold."""
    attached = [
        Attached({"state": module_of(make_state(*shape))}, Mesh((("dp", ranks),)), rank) for rank in range(ranks)
    ]
    sizes = {one.rank: one.share_bytes() for one in attached}
    slots = ray.get(store.open_attempt.remote(1, ATTEMPT, sizes, "", 0, "periodic", False))
    assert isinstance(slots, dict), slots
    for one in attached:
        stager = Stager()
        share = capture_and_stage(one, stager, slots[one.rank], attempt=ATTEMPT, point=PointInTime(1, STEP))
        ray.get(store.seal.remote(share, 1))
        stager.close()
    _, events = ray.get(store.poll.remote(0, 10.0))
    reports = tuple(event.report for event in events)
    assert len(reports) == ranks, events
    assert all(reports), events
    ray.get(store.commit.remote(ATTEMPT))
    upload = Upload(ATTEMPT, new_snapshot_id(time.time(), "0000"), STEP, "write", {})
    files = ray.get(store.upload.remote(upload, tuple(range(ranks)), 0))
    places = dict.fromkeys(range(ranks), HOLDER)
    ray.get(store.commit_durable.remote(upload, places, reports, tuple(files), {}))
    return NodeSnapshot(ATTEMPT, STEP, dict.fromkeys(range(ranks), (HOLDER,))), RemoteSnapshot(ATTEMPT, STEP)


@ray.remote(num_cpus=0, resources={READER: 0.01})
class Rank:
    """A rank that has built its model and restores it."""

    def __init__(self, rank: int, shape: tuple[int, int], ranks: int) -> None:
        self.ranks = ranks
        targets = make_state(*shape, seed=7)
        self.targets = targets
        self.attached = Attached({"state": module_of(targets)}, Mesh((("dp", ranks),)), rank)
        self.reader = StoreReader(RUN, READER)

    def pid(self) -> int:
        return psutil.Process().pid

    def restore(self, generation: int, order: RestoreOrder) -> tuple[float, dict[str, int]]:
        """Seconds, and bytes by place."""
        index, source, _ = self.reader.open(order, generation, self.attached.rank, self.ranks)
        report = restore(self.attached, index, source)
        self.reader.done()
        return report.seconds, dict(report.bytes_from)

    def spoil(self) -> None:
        for target in self.targets.values():
            target.zero_()

    def holds(self, shape: tuple[int, int]) -> bool:
        return all(torch.equal(self.targets[name], value) for name, value in make_state(*shape).items())


def set_sizes(processes: Sequence[psutil.Process]) -> int:
    """Bytes of memory of the processes, shared pages counted once among all that share them."""
    total = 0
    for process in processes:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


class Watch:
    """The most that the processes take while the block runs, over what they took before."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self.processes, self.most = processes, 0
        self._over = threading.Event()

    def __enter__(self) -> Watch:
        self.before = set_sizes(self.processes)
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, set_sizes(self.processes) - self.before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="64 MiB of state")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    shape = (4 if options.quick else options.mib // 16, 16 << 20)
    state_bytes = shape[0] * shape[1]
    storage = tempfile.mkdtemp()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for node in (HOLDER, READER):
        raylet = cluster.add_node(num_cpus=1, resources={node: 1}, object_store_memory=256 << 20, wait=True)
    result: dict[str, Any] = {"state_bytes": state_bytes, "ranks": options.ranks}
    try:
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
        stores = {node: start_store(node, storage) for node in (HOLDER, READER)}
        node_snapshot, remote = save(stores[HOLDER], shape, options.ranks)
        ranks = [Rank.remote(rank, shape, options.ranks) for rank in range(options.ranks)]
        ray.get([rank.pid.remote() for rank in ranks])
        node = psutil.Process(raylet.all_processes["raylet"][0].process.pid)
        processes = [node, *(p for p in node.children(recursive=True) if "agent" not in " ".join(p.cmdline()))]
        print(f"{state_bytes >> 20} MiB restored by {options.ranks} ranks of one node")
        orders = {"remote": RestoreOrder(STEP, None, remote, ""), "peer": RestoreOrder(STEP, node_snapshot, remote, "")}
        for number, (name, order) in enumerate(orders.items()):
            ray.get([rank.spoil.remote() for rank in ranks])
            with Watch(processes) as watch:
                answers = ray.get([rank.restore.remote(number + 2, order) for rank in ranks])
            assert all(ray.get([rank.holds.remote(shape) for rank in ranks])), "what was restored is not what was saved"
            assert all(places.get(name) == state_bytes for _, places in answers), answers
            seconds = max(seconds for seconds, _ in answers)
            result[name] = watch.most
            print(f"{name:8} {watch.most / 2**20:6.0f} MiB besides the targets   {seconds:.2f} s")
        result["extra_bytes"] = max(result[name] for name in orders)
        for store in stores.values():
            ray.get(store.close.remote())
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(storage, ignore_errors=True)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
