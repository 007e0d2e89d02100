"""A state saved on one mesh and loaded on another, against dcp.load of the same state, in the same processes.

    python tests/benchmarks/reshard.py [--quick] [--json] [--repeats 5] [--dir DIR]

``8to6``: sharded over 8 ranks (dp), loaded by 6, which cuts every tensor elsewhere. ``tp2dp2_to_tp4``: cut over tensor
and data parallel, loaded on tensor parallel alone. Ranks are processes joined by gloo, tensors are DTensors; each side
reads what it has written itself, from a warm page cache into tensors that exist. Ours verifies every chunk, DCP none.

``speedup``: DCP's seconds over ours (the slowest rank, medians over alternating repeats). ``peak_bytes``: the most that
a process grew while it loaded, ours and DCP's. With ``--json`` one object on the last line.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_run import module_of

from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime, SlotRef, StagedShare
from elastic.snapshot.capture import Attached
from elastic.snapshot.committer import commit_remote
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.object_names import attempt_name, attempt_prefix, new_snapshot_id
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.restore import restore
from elastic.snapshot.staging import Stager, capture_and_stage
from elastic.storage.local_blobs import LocalBlobs

RUN = "bench"
Axes = tuple[tuple[str, int], ...]
MOVES: dict[str, tuple[Axes, Axes]] = {
    "8to6": ((("dp", 8),), (("dp", 6),)),
    "tp2dp2_to_tp4": ((("dp", 2), ("tp", 2)), (("tp", 4),)),
}


class Rank:
    """One process: what it is told, on the mesh that it was last told to form."""

    def __init__(self, number: int, tensors: int, side: int) -> None:
        self.number, self.tensors, self.side = number, tensors, side
        self.stager = Stager()

    def form(self, axes: Axes, meet: str, filled: bool) -> None:
        """Join the others of the mesh, and make the state: with its values, or with zeros."""
        size = math.prod(n for _, n in axes)
        dist.init_process_group("gloo", rank=self.number, world_size=size, store=dist.FileStore(meet, size))
        self.mesh = Mesh(axes)
        device_mesh = init_device_mesh("cpu", tuple(n for _, n in axes), mesh_dim_names=tuple(a for a, _ in axes))
        self.state: dict[str, torch.Tensor] = {}
        for i in range(self.tensors):
            # Tensor parallel cuts every other matrix across, as the second of a pair of linear layers.
            placements = [Shard(i % 2 if axis == "tp" else 0) for axis, _ in axes]
            part, offset = compute_local_shape_and_global_offset((self.side, self.side), device_mesh, placements)
            local = self._values(i, tuple(part), tuple(offset)) if filled else torch.zeros(tuple(part))
            shape, stride = torch.Size((self.side, self.side)), (self.side, 1)
            self.state[f"t{i}"] = DTensor.from_local(
                local, device_mesh, placements, run_check=False, shape=shape, stride=stride
            )
        self.attached = Attached({"state": module_of(self.state)}, self.mesh, self.number)

    def leave(self) -> None:
        dist.destroy_process_group()

    def share_bytes(self) -> int:
        return self.attached.share_bytes()

    def stage(self, slot: SlotRef, attempt: str) -> StagedShare:
        return capture_and_stage(self.attached, self.stager, slot, attempt=attempt, point=PointInTime(1, 1))

    def save_dcp(self, directory: str) -> None:
        dcp.save(self.state, storage_writer=dcp.FileSystemWriter(directory))

    def load_dcp(self, directory: str) -> tuple[float, int]:
        return self._load(lambda: dcp.load(self.state, storage_reader=dcp.FileSystemReader(directory)))

    def load_ours(self, store: LocalBlobs, ref: SnapshotRef) -> tuple[float, int]:
        def load() -> None:
            catalog = SnapshotCatalog(store, RUN)
            restore(self.attached, catalog.open(ref), catalog.source(ref))

        return self._load(load)

    def _load(self, load: Any) -> tuple[float, int]:
        """Seconds, and the bytes by which this process grew; what was loaded is checked and wiped out."""
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before, started = _kib("VmHWM"), time.perf_counter()
        load()
        seconds, grown = time.perf_counter() - started, _kib("VmHWM") - before
        for i in range(self.tensors):
            held = self.state[f"t{i}"]
            assert isinstance(held, DTensor)
            part, offset = compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)
            assert torch.equal(held.to_local(), self._values(i, tuple(part), tuple(offset))), "not what was saved"
            held.to_local().zero_()
        return seconds, grown << 10

    def _values(self, number: int, shape: tuple[int, ...], offset: tuple[int, ...]) -> torch.Tensor:
        rows, columns = (torch.arange(at, at + n) for at, n in zip(offset, shape))
        return ((rows[:, None] * self.side + columns) * 31 + number).remainder(1 << 20).float()


def _kib(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def serve(connection: Any, rank: Rank) -> None:
    """A process's life: a method's name and arguments in, its answer out."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    while (order := connection.recv()) is not None:
        name, arguments = order
        connection.send(getattr(rank, name)(*arguments))


class Ranks:
    """Processes that all do the same at once."""

    def __init__(self, count: int, tensors: int, side: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for number in range(count):
            here, there = fork.Pipe()
            process = fork.Process(target=serve, args=(there, Rank(number, tensors, side)), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def all(self, count: int, name: str, *arguments: Any) -> list[Any]:
        """The answers of the first ``count`` to the same call."""
        return self.each(name, [arguments] * count)

    def each(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        for pipe, given in zip(self._pipes, arguments):
            pipe.send((name, given))
        return [pipe.recv() for pipe, _ in zip(self._pipes, arguments)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def save(ranks: Ranks, count: int, directory: Path, store: LocalBlobs) -> SnapshotRef:
    """A durable snapshot of what ``count`` ranks hold, by way of one node's arena."""
    attempt, snapshot_id = attempt_name(1, 1), new_snapshot_id(time.time(), "0000")
    tier = NodeTier(f"/dev/shm/elastic-arena-bench-{os.getpid()}")
    try:
        sizes = dict(enumerate(ranks.all(count, "share_bytes")))
        tier.reserve(max(sizes.values()), count)
        slots = tier.open_attempt(attempt, sizes)
        assert slots is not None
        staged = ranks.each("stage", [(slots[rank], attempt) for rank in range(count)])
        reports = [tier.seal(share) for share in staged]
        tier.commit(attempt)
        files = tier.upload(attempt, store, attempt_prefix(RUN, 1, snapshot_id, attempt), node=0)
        index = tier.index(attempt, snapshot_id=snapshot_id)
        return commit_remote(
            store, RUN, index, reports, files, versions={}, has={}, write_id="write", committed_at_s=time.time()
        )
    finally:
        tier.close()


def measure(ranks: Ranks, before: Axes, after: Axes, repeats: int, directory: Path) -> dict[str, float]:
    """Median seconds of the slowest rank and the most growth of a process, ours and DCP's."""
    store, theirs = LocalBlobs(directory / "ours"), str(directory / "dcp")
    first, second = (math.prod(n for _, n in axes) for axes in (before, after))
    ranks.all(first, "form", before, str(directory / "meet1"), True)
    ranks.all(first, "save_dcp", theirs)
    ref = save(ranks, first, directory, store)
    ranks.all(first, "leave")
    ranks.all(second, "form", after, str(directory / "meet2"), False)
    found: dict[str, list[float]] = {"dcp_s": [], "ours_s": [], "dcp_bytes": [], "ours_bytes": []}
    for number in range(repeats + 1):
        for name, arguments in (("dcp", (theirs,)), ("ours", (store, ref))):
            answers = ranks.all(second, f"load_{name}", *arguments)
            if number:  # the first time brings imports and the page cache along
                found[f"{name}_s"].append(max(seconds for seconds, _ in answers))
                found[f"{name}_bytes"].append(max(grown for _, grown in answers))
    ranks.all(second, "leave")
    return {name: statistics.median(values) if name.endswith("_s") else max(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small tensors, one repeat")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", default=None, help="directory to save in (default: a temporary one)")
    options = parser.parse_args()
    tensors, side, repeats = (8, 256, 1) if options.quick else (24, 2048, options.repeats)
    ranks = Ranks(8, tensors, side)
    result: dict[str, dict[str, Any]] = {"speedup": {}, "peak_bytes": {}, "seconds": {}}
    print(f"{tensors} matrices, {tensors * side * side * 4 >> 20} MiB")
    print(f"{'reshard':15} {'dcp.load':>9} {'ours':>8} {'×':>6}   growth of a process: dcp, ours")
    try:
        for name, (before, after) in MOVES.items():
            with tempfile.TemporaryDirectory(dir=options.dir) as directory:
                found = measure(ranks, before, after, repeats, Path(directory))
            speedup = found["dcp_s"] / found["ours_s"]
            result["speedup"][name] = round(speedup, 2)
            result["peak_bytes"][name] = {"dcp": found["dcp_bytes"], "ours": found["ours_bytes"]}
            result["seconds"][name] = {key: round(found[f"{key}_s"], 4) for key in ("dcp", "ours")}
            print(
                f"{name:15} {found['dcp_s']:9.3f} {found['ours_s']:8.3f} {speedup:6.1f}   "
                f"{found['dcp_bytes'] / 2**20:.0f} MiB, {found['ours_bytes'] / 2**20:.0f} MiB",
                flush=True,
            )
    finally:
        ranks.close()
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
