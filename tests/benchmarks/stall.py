"""How long training stands still for a snapshot, against one memory copy of the same bytes and against DCP.

    python tests/benchmarks/stall.py [--quick] [--json] [--repeats 7] [--threads N] [--shapes big,mid,medium,small]

Ours is capture and staging of a module into a warm arena slot, complete on return: what a rank does at a boundary.
The copy is one tensor of all the bytes into another, both touched before. DCP is ``async_save`` to a local directory,
once with its defaults and once with a ``DefaultStager`` that is kept from save to save; its stall is the time until
``async_save`` has returned and its staging is done. Its upload is awaited between measurements. Medians over repeats
in which the four take turns. With ``--json`` one object on the last line.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime
from elastic.snapshot.arena import ArenaPool
from elastic.snapshot.capture import Attached
from elastic.snapshot.staging import Stager, capture_and_stage

MIB = 1 << 20
SHAPES = {"big": (16, 64 * MIB), "mid": (128, 8 * MIB), "medium": (4000, MIB // 4), "small": (20000, MIB // 64)}
"""Tensors and bytes of each."""
QUICK = {"big": (4, 8 * MIB), "mid": (16, 2 * MIB), "medium": (200, MIB // 4), "small": (1000, MIB // 64)}
CPU_STAGING = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
"""The defaults need an accelerator; without one, this keeps one copy of the state and writes into it each time."""
TARGETS = {
    "over_memcpy": {"big": 1.3, "mid": 1.3, "medium": 1.3, "small": 3.0},
    "over_dcp_async": dict.fromkeys(SHAPES, 0.25),
    "over_dcp_stager": {"big": 1.0, "mid": 1.0, "medium": 0.5, "small": 0.5},
}


def seconds_of(action: Callable[[], object]) -> tuple[float, object]:
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


class Ours:
    """One rank and an arena of two slots, taken in turn."""

    def __init__(self, model: nn.Module, directory: Path) -> None:
        self.attached = Attached({"model": model}, Mesh((("dp", 1),)), 0)
        self.stager, self.pool = Stager(), ArenaPool(directory)
        self.pool.reserve(2, self.attached.share_bytes())
        self.slots = [self.pool.take(self.attached.share_bytes()) for _ in range(2)]
        self.step = 0

    def __call__(self) -> float:
        slot = self.slots[self.step % 2]
        assert slot is not None
        self.step += 1
        point = PointInTime(0, self.step)
        return seconds_of(
            lambda: capture_and_stage(self.attached, self.stager, slot, attempt=f"a{self.step}", point=point)
        )[0]

    def close(self) -> None:
        self.stager.close()
        self.pool.close()


class Peer:
    """``dcp.async_save``; the stall ends when the state may change again."""

    def __init__(self, state: dict[str, torch.Tensor], directory: Path, stager: DefaultStager | None) -> None:
        self.state, self.directory, self.stager, self.saves = state, directory, stager, 0

    def __call__(self) -> float:
        target = self.directory / f"dcp{self.saves}"
        self.saves += 1
        writer = dcp.FileSystemWriter(target, sync_files=False)
        started = time.perf_counter()
        response = dcp.async_save(self.state, storage_writer=writer, async_stager=self.stager)
        if hasattr(response, "staging_completion"):
            response.staging_completion.result()
        stall = time.perf_counter() - started
        (response.upload_completion if hasattr(response, "upload_completion") else response).result()
        shutil.rmtree(target)
        return stall

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


def measure(tensors: int, nbytes: int, repeats: int, directory: Path) -> dict[str, float]:
    """Median seconds of the four, on ``tensors`` float32 tensors of ``nbytes`` each."""
    model = nn.Module()
    for number in range(tensors):
        model.register_parameter(f"t{number}", nn.Parameter(torch.full((nbytes // 4,), 1.0 + number)))
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    source, target = (torch.ones(tensors * nbytes // 4) for _ in range(2))
    ours = Ours(model, directory / "arena")
    peers = [Peer(state, directory, None), Peer(state, directory, DefaultStager(CPU_STAGING))]
    runs: dict[str, Callable[[], float]] = {
        "ours_s": ours,
        "memcpy_s": lambda: seconds_of(lambda: target.copy_(source))[0],
        "dcp_async_s": peers[0],
        "dcp_stager_s": peers[1],
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):  # the first two warm up both slots, DCP's cached plan and its stager
        for name, run in runs.items():
            elapsed = run()
            if repeat >= 2:
                times[name].append(elapsed)
    ours.close()
    for peer in peers:
        peer.close()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="small states and few repeats: does it run")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    arguments = parser.parse_args()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    repeats = 3 if arguments.quick else arguments.repeats
    measured: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(
        prefix="stall-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as directory:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        for shape in arguments.shapes.split(","):
            tensors, nbytes = (QUICK if arguments.quick else SHAPES)[shape]
            measured[shape] = measure(tensors, nbytes, repeats, Path(directory) / shape)
            gc.collect()
        dist.destroy_process_group()
    result: dict[str, dict[str, float]] = {key: {} for key in TARGETS}
    table = Table("shape", "memory copy", "ours", "DCP async", "DCP stager", "÷ copy", "÷ async", "÷ stager")
    for shape, times in measured.items():
        cells = [
            shape,
            *(f"{times[name] * 1e3:.1f} ms" for name in ("memcpy_s", "ours_s", "dcp_async_s", "dcp_stager_s")),
        ]
        for key, name in (
            ("over_memcpy", "memcpy_s"),
            ("over_dcp_async", "dcp_async_s"),
            ("over_dcp_stager", "dcp_stager_s"),
        ):
            result[key][shape] = round(times["ours_s"] / times[name], 3)
            good = result[key][shape] <= TARGETS[key][shape]
            cells.append(f"[{'green' if good else 'red'}]{result[key][shape]:.2f}[/] (≤ {TARGETS[key][shape]:g})")
        table.add_row(*cells)
    Console().print(table)
    if arguments.json:
        print(json.dumps({**result, "seconds": measured, "threads": arguments.threads, "quick": arguments.quick}))


if __name__ == "__main__":
    main()
