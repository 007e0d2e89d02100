"""The way out of a generation's process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import distributed_c10d


def leave_process_groups(let_go: Callable[[], None]) -> None:
    """Destroy the process groups of this process, and ``let_go`` of what was built on them.

    The last reference to each group is dropped here. A gloo group waits, when it goes, for its threads, and one of
    these may need the GIL to get rid of a collective that failed. torch gives the GIL up for that where Python held the
    last reference; where it was a DDP reducer, within a garbage collection, the two wait for each other for ever.
    """
    groups = list(distributed_c10d._world.pg_map)
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    let_go()
    groups.clear()
