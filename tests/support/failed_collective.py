"""A process that leaves a group of two whose other rank dies, at the worst moment: see the test that runs it.

A collective fails while this process collects garbage, and what it holds has to be let go of with the GIL.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from actors.process_groups import leave_process_groups


def peer(port: int, ready: Any) -> None:
    """The other rank, until it is killed."""
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=1, world_size=2)
    DistributedDataParallel(torch.nn.Linear(4, 4))
    ready.set()
    time.sleep(600)


class KillsPeer:
    """Ends the other rank when it is collected, and gives the collective that waits for it the time to fail."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid

    def __del__(self) -> None:
        assert self._pid is not None
        os.kill(self._pid, 9)
        until = time.perf_counter() + 0.5
        while time.perf_counter() < until:
            pass


def warm_up() -> None:
    """The first group of a process is kept by torch for good, the second is not."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    DistributedDataParallel(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()
    leave_process_groups(gc.collect)


def main() -> None:
    warm_up()
    spawn = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ready = spawn.Event()
    other = spawn.Process(target=peer, args=(store.port, ready), daemon=True)
    other.start()
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    model: Any = DistributedDataParallel(torch.nn.Linear(4, 4))
    ready.wait()
    gc.disable()
    # As backward does: what it puts aside for the collectives that it starts is theirs alone once it is over.
    torch._C._stash_obj_in_tls("context", [object()])
    dist.all_reduce(torch.ones(8), async_op=True)
    torch._C._remove_obj_from_tls("context")
    sys.setswitchinterval(1000.0)
    circle: list[Any] = [model, KillsPeer(other.pid)]
    circle.append(circle)
    del model, circle
    leave_process_groups(gc.collect)
    print("left", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
