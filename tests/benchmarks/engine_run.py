"""One rank's state through the real engine: capture, stage, seal, upload with fsync, commit; and back, verified."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime
from elastic.snapshot.capture import Attached
from elastic.snapshot.committer import commit_remote
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.object_names import attempt_name, attempt_prefix, new_snapshot_id
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.restore import restore
from elastic.snapshot.staging import Stager, capture_and_stage
from elastic.storage.local_blobs import LocalBlobs

SHAPES = {
    "big": (16, 64 << 20),
    "mid": (128, 8 << 20),
    "medium": (4000, 256 << 10),
    "small": (20000, 16 << 10),
}
"""Name to (tensors, bytes of each)."""
QUICK = {"big": (4, 8 << 20), "mid": (16, 1 << 20), "medium": (200, 64 << 10), "small": (1000, 16 << 10)}
RUN = "bench"


def make_state(tensors: int, nbytes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """So many float32 tensors of so many bytes, of random values."""
    generator = torch.Generator().manual_seed(seed)
    return {f"t{i}": torch.rand(nbytes // 4, generator=generator) for i in range(tensors)}


def module_of(state: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose buffers are ``state``."""
    module = torch.nn.Module()
    for name, tensor in state.items():
        module.register_buffer(name, tensor)
    return module


QUIET_S = 0.02
SETTLE_WITHIN_S = 20.0


def settle(directory: Path) -> None:
    """Return when the disk has done what it was told before: three syncs in a row are quick, or it never gets quiet."""
    os.sync()
    quick, until = 0, time.monotonic() + SETTLE_WITHIN_S
    while quick < 3 and time.monotonic() < until:
        started = time.perf_counter()
        with open(directory / "settle", "wb") as file:
            file.write(b"0")
            file.flush()
            os.fsync(file.fileno())
        quick = quick + 1 if time.perf_counter() - started < QUIET_S else 0


FORGOTTEN_S = 6.0
"""Longer than a file system waits before it tells the disk which blocks are free."""
FORGET_WITHIN_S = 60.0


def forget() -> None:
    """Return when the disks have taken back the blocks of deleted files: none has been told of any for a while."""
    os.sync()
    told, since, until = -1, time.monotonic(), time.monotonic() + FORGET_WITHIN_S
    while time.monotonic() - since < FORGOTTEN_S and time.monotonic() < until:
        lines = Path("/proc/diskstats").read_text().splitlines()
        discards = sum(int(line.split()[14]) for line in lines if len(line.split()) > 14)
        if discards != told:
            told, since = discards, time.monotonic()
        time.sleep(0.1)


class EngineRun:
    """One rank on one node with a local store."""

    def __init__(self, directory: Path, state: Mapping[str, torch.Tensor], threads: int = 2) -> None:
        self.state = state
        self.store = LocalBlobs(directory / "store")
        self.tier = NodeTier(f"/dev/shm/elastic-arena-bench-{os.getpid()}", threads=threads)
        self.targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self.restored = Attached({"state": module_of(self.targets)}, Mesh((("dp", 1),)), 0)
        self.attached = Attached({"state": module_of(state)}, Mesh((("dp", 1),)), 0)
        self.stager = Stager()
        self.share_bytes = self.attached.share_bytes()
        self.tier.reserve(self.share_bytes, 1)
        for slot in self.tier.arena.slots:
            self.stager.open(slot)
        self.number = 0

    def save(self, previous: SnapshotRef | None = None) -> tuple[SnapshotRef, dict[str, float]]:
        """A durable snapshot; where the seconds went."""
        self.number += 1
        attempt, moments = attempt_name(1, self.number), [time.perf_counter()]
        slots = self.tier.open_attempt(attempt, {0: self.share_bytes})
        assert slots is not None
        staged = capture_and_stage(
            self.attached, self.stager, slots[0], attempt=attempt, point=PointInTime(1, self.number)
        )
        moments.append(time.perf_counter())
        report = self.tier.seal(staged)
        self.tier.commit(attempt)
        moments.append(time.perf_counter())
        snapshot_id = new_snapshot_id(time.time(), f"{self.number:04x}")
        prefix = attempt_prefix(RUN, self.number, snapshot_id, attempt)
        files = self.tier.upload(attempt, self.store, prefix, node=0, previous=previous)
        moments.append(time.perf_counter())
        ref = commit_remote(
            self.store,
            RUN,
            self.tier.index(attempt, snapshot_id=snapshot_id),
            [report],
            files,
            versions={},
            has={},
            write_id=snapshot_id,
            committed_at_s=time.time(),
            previous=previous,
        )
        moments.append(time.perf_counter())
        names = ("stage", "seal", "upload", "commit")
        parts = {name: b - a for name, a, b in zip(names, moments, moments[1:])}
        parts["uploaded_bytes"] = float(sum(record.nbytes for record in files if record.kind == "pack"))
        return ref, parts

    def load(self, ref: SnapshotRef) -> dict[str, float]:
        """Every chunk verified, into the preallocated ``targets``; where the seconds went."""
        started = time.perf_counter()
        catalog = SnapshotCatalog(self.store, RUN)
        index = catalog.open(ref)
        opened = time.perf_counter()
        report = restore(self.restored, index, catalog.source(ref))
        ended = time.perf_counter()
        return {"open": opened - started, **report.parts_s, "load_total": ended - started}

    def close(self) -> None:
        self.stager.close()
        gc.collect()
        self.tier.close()
