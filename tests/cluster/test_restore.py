"""A node reads each chunk of a snapshot once, however many of its ranks want it; a damaged one is given up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from support.cluster import JOBS, TestCluster

import elastic
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.blob_store import BlobStore, open_store

SPY = """
import json, os
from elastic.storage.local_blobs import LocalBlobs

def spied(name):
    inner = getattr(LocalBlobs, name)
    def call(self, key, start, wanted):
        found = inner(self, key, start, wanted)
        if key.endswith(".pack") and (name != "mapped" or found is not None):
            buffers = [wanted] if isinstance(wanted, memoryview) else wanted
            size = wanted if name == "mapped" else sum(b.nbytes for b in buffers)
            with open(os.environ["SPY_LOG"], "a") as log:
                log.write(json.dumps([os.getpid(), key, start, size]) + "\\n")
        return found
    setattr(LocalBlobs, name, call)

for name in ("read_into", "scatter", "mapped"):
    spied(name)
"""
"""Every process of the run notes what it reads of packs."""


def spoil(store: BlobStore, ref: SnapshotRef) -> None:
    """Change one bit of a pack."""
    key = next(key for key in store.list(ref.prefix) if key.endswith(".pack"))
    body = bytearray(store.get(key))
    body[len(body) // 2] ^= 1
    store.put(key, body)


def test_two_ranks_read_every_chunk_once_and_leave_a_damaged_snapshot_for_an_older_one(
    cluster: TestCluster, tmp_path: Path
) -> None:
    pair = cluster.cluster.add_node(num_cpus=1, resources={"pair": 2}, object_store_memory=100 << 20, wait=True)
    cluster.nodes[pair.node_id] = pair
    (tmp_path / "sitecustomize.py").write_text(SPY)
    here = str(Path(elastic.__file__).parents[1])
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), here]), "SPY_LOG": str(tmp_path / "reads")}

    def run(steps: int) -> elastic.Result:
        return elastic.ElasticTrainer(
            f"{JOBS}:train",
            train_loop_config={"steps": steps, "width": 1024},
            scaling_config=elastic.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5, "pair": 1}),
            run_config=elastic.RunConfig(
                name="pair", storage_path=str(tmp_path / "runs"), worker_runtime_env={"env_vars": env}
            ),
        ).fit()

    try:
        assert run(2).error is None
        (tmp_path / "reads").unlink(missing_ok=True)  # what uploads looked at
        result = run(3)
        reads: list[Any] = [json.loads(line) for line in (tmp_path / "reads").read_text().splitlines()]
        store = open_store(str(tmp_path / "runs"))
        catalog = SnapshotCatalog(store, "pair")
        saved, damaged = catalog.find(2), catalog.find(3)
        assert saved is not None
        assert damaged is not None
        spoil(store, damaged)
        again = run(4)
    finally:
        cluster.kill_node(pair.node_id, "pair")
    assert result.error is None
    assert (result.generations[0].restored_from, result.generations[0].restored_step) == ("remote", 2)

    assert len({pid for pid, *_ in reads}) == 1, "the ranks leave storage to their store"
    spans = sorted((key, start, start + size) for _, key, start, size in reads if saved.directory in key)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(spans, spans[1:])), "no byte was read twice"
    table = catalog.open(saved).table
    assert sum(stop - start for _, start, stop in spans) >= table.total_bytes > 12 << 20

    assert again.error is None
    assert (again.generations[-1].restored_step, again.step) == (2, 4)
    assert len(again.generations) == 3, "two tries of the damaged one come first"
    catalog.list()
    assert "chunk" in catalog.failed[damaged.directory]
