"""Real ranks: one process each, joined by gloo. Each keeps the shares of all, so that any of them can restore."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.replicas import accept_share

from elastic.protocol.shares import PointInTime
from elastic.snapshot.capture import Attached
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.sources import VerifiedSource
from elastic.snapshot.staging import Stager, capture_and_stage

PRELOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]
"""Imported once, by the server that ranks are forked from: each would take longer over it than over its test."""


def run_ranks(world_size: int, function: Callable[..., None], directory: Path, *args: Any) -> None:
    """Call ``function(rank, directory, *args)`` on so many processes; what one raises is raised here."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(_start, (world_size, function, directory, args), nprocs=world_size, start_method="forkserver")


def _start(rank: int, world_size: int, function: Callable[..., None], directory: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "meet"), world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    try:
        function(rank, directory, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def take_snapshot_together(tier: NodeTier, attached: Attached, attempt: str) -> tuple[SnapshotIndex, VerifiedSource]:
    """All ranks capture, stage and seal, and send their shares to all others."""
    rank, world_size = attached.rank, attached.mesh.world_size
    sizes: list[int] = [0] * world_size
    dist.all_gather_object(sizes, attached.share_bytes())
    tier.reserve(max(sizes), world_size)
    others = {other: size for other, size in enumerate(sizes) if other != rank}
    slots = tier.open_attempt(attempt, {rank: sizes[rank]}, others)
    assert slots is not None
    share = capture_and_stage(attached, Stager(), slots[rank], attempt=attempt, point=PointInTime(1, 0))
    tier.seal(share)
    header, data = tier.export_share(attempt, rank)
    sent: list[tuple[bytes, bytes]] = [(b"", b"")] * world_size
    dist.all_gather_object(sent, (header, bytes(data)))
    for other in others:
        accept_share(tier, attempt, other, *sent[other])
    tier.commit(attempt)
    index = tier.index(attempt)
    index.check_coverage()
    return index, tier.source(attempt)
