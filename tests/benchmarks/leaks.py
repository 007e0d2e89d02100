"""Memory, open files and shared memory of a run's processes after many snapshots, against those after a few.

    python tests/benchmarks/leaks.py [--quick] [--json] [--few 10] [--many 200]

A real run: controller, node store and one rank as actors on a private Ray, with a small model, a snapshot every few
steps, each of them durable, all but the newest three let go again. ``grown_files`` and ``grown_shm_bytes`` must be 0;
``grown_bytes`` (memory that is the process's own) is told for each process, and per snapshot. With ``--json`` one
object on the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

import elastic
from actors.node_store import ARENA_PREFIX

RUN = "leaks"
SAMPLES = 9
ROLES = {"rank": "ray::Rank", "store": "ray::NodeStore", "controller": "ray::Controller"}
STANDS_STILL_S = 300.0


def train(config: dict[str, Any]) -> None:
    """Steps without end; the run is stopped from outside."""
    run = elastic.current_run()
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4096, 256)
    loader = elastic.ElasticLoader(torch.utils.data.TensorDataset(x), global_batch_size=8, seed=1)
    run.attach(model=model, optimizer=optimizer, loader=loader)
    for (inputs,) in run.steps(loader):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)


def processes() -> dict[str, psutil.Process]:
    """The run's processes by role."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            found |= {role: process for role, begins in ROLES.items() if title.startswith(begins)}
    return found


def sample(found: dict[str, psutil.Process]) -> dict[str, Any]:
    """Medians of a few looks: bytes and files of each process, and bytes in shared memory."""
    looks: list[dict[str, float]] = []
    for _ in range(SAMPLES):
        look = {"shm": float(sum(f.stat().st_blocks * 512 for f in Path("/dev/shm").glob(f"{ARENA_PREFIX}{RUN}-*/*")))}
        for role, process in found.items():
            look[f"{role}_bytes"] = float(process.memory_full_info().uss)
            # Connections come and go; what stays open are files, maps and pipes.
            look[f"{role}_files"] = float(process.num_fds() - len(process.net_connections()))
        looks.append(look)
        time.sleep(0.1)
    return {name: statistics.median(look[name] for look in looks) for name in looks[0]}


def wait_for(handle: Any, snapshots: int) -> None:
    """Return when the run has committed so many, however long that takes, as long as there are new ones."""
    most, since = -1, time.monotonic()
    while (status := handle.status())["snapshots"] < snapshots:
        if status["snapshots"] > most:
            most, since = status["snapshots"], time.monotonic()
        if status["result"] is not None or time.monotonic() > since + STANDS_STILL_S:
            raise RuntimeError(f"the run came to {status['snapshots']} snapshots only: {status['alarms']}")
        time.sleep(0.05)


def measure(few: int, many: int, directory: str) -> dict[str, Any]:
    """What grew from ``few`` to ``many`` snapshots."""
    trainer = elastic.ElasticTrainer(
        f"{os.path.abspath(__file__)}:train",
        scaling_config=elastic.ScalingConfig(num_workers=1),
        run_config=elastic.RunConfig(
            name=RUN,
            storage_path=directory,
            snapshots=elastic.SnapshotConfig(interval="3 steps", remote_every=1, replicas=0, when_busy="block"),
        ),
    )
    handle = trainer.start()
    try:
        wait_for(handle, few)
        found = processes()
        assert set(found) == set(ROLES), f"found only {sorted(found)}"
        early = sample(found)
        began = handle.status()["snapshots"]
        wait_for(handle, many)
        late = sample(found)
        taken = handle.status()["snapshots"] - began
    finally:
        handle.stop()
        handle.wait()
    grown = {name: late[name] - early[name] for name in early}
    return {
        "snapshots": taken,
        "grown_files": {role: grown[f"{role}_files"] for role in ROLES},
        "grown_shm_bytes": grown["shm"],
        "grown_bytes": {role: grown[f"{role}_bytes"] for role in ROLES},
        "bytes_per_snapshot": {role: round(grown[f"{role}_bytes"] / taken) for role in ROLES},
        "early": early,
        "late": late,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few snapshots only")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--few", type=int, default=10)
    parser.add_argument("--many", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    few, many = (3, 8) if options.quick else (options.few, options.many)
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    try:
        with tempfile.TemporaryDirectory() as directory:
            result = measure(few, many, directory)
    finally:
        ray.shutdown()
    print(f"{'process':>10} {'memory then':>12} {'now':>9} {'per snapshot':>13} {'files then':>11} {'now':>5}")
    for role in ROLES:
        early, late = result["early"], result["late"]
        print(
            f"{role:>10} {early[f'{role}_bytes'] / 2**20:>8.1f} MiB {late[f'{role}_bytes'] / 2**20:>5.1f} MiB "
            f"{result['bytes_per_snapshot'][role]:>9,} B {early[f'{role}_files']:>11.0f} {late[f'{role}_files']:>5.0f}"
        )
    print(f"shared memory: {result['early']['shm'] / 2**20:.2f} MiB then, {result['late']['shm'] / 2**20:.2f} MiB now")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
