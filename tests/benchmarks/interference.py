"""How much of its speed a train loop that is bound by Python keeps while a snapshot drains beside it.

    python tests/benchmarks/interference.py [--quick] [--json] [--mib 256] [--steps 1500]

A real run on a private Ray: one rank whose step is a loop in Python, with so much state attached; a snapshot every
200 steps is staged, hashed, uploaded with fsync and committed by the node's store. ``kept.free`` is the median time
of a step outside of any snapshot over the mean time of a step while one drains, stalls not counted; ``kept.pinned``
the same with the rank's process on one core and all others of the run on the rest. On two cores the machine's other
processes share them too. With ``--json`` one object on the last line.
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
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

import elastic
from elastic.observe.history import journal_records
from elastic.storage.blob_store import open_store

EVERY_STEPS = 200
LOOP = 60_000
"""Turns of the loop in a step: a few milliseconds."""


def train(config: dict[str, Any]) -> None:
    """Each step counts in Python and tells when it ended and how long it took."""
    run = elastic.current_run()
    model = torch.nn.Module()
    for number in range(max(1, config["mib"] // 8)):
        model.register_parameter(f"t{number}", torch.nn.Parameter(torch.full((2 << 20,), float(number))))
    loader = elastic.ElasticLoader(torch.utils.data.TensorDataset(torch.zeros(64)), global_batch_size=8, seed=1)
    run.attach(model=model, loader=loader)
    for _ in run.steps(loader, until_step=config["steps"]):
        started, total = time.perf_counter(), 0
        for turn in range(LOOP):
            total += turn & 3
        with torch.no_grad():
            model.t0.add_(1)
        run.report(took_s=time.perf_counter() - started, ended_at_s=time.time())


def pin(stop: threading.Event) -> None:
    """Keep the rank's threads on the last core and those of all other processes below this one on the others."""
    cores = sorted(os.sched_getaffinity(0))
    while not stop.wait(0.2):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                of_rank = " ".join(process.cmdline()).startswith("ray::Rank")
                for thread in Path(f"/proc/{process.pid}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), cores[-1:] if of_rank else cores[:-1])


def kept(pinned: bool, mib: int, steps: int, directory: str) -> dict[str, float]:
    """One run; see the module."""
    name = "pinned" if pinned else "free"
    trainer = elastic.ElasticTrainer(
        f"{os.path.abspath(__file__)}:train",
        train_loop_config={"mib": mib, "steps": steps},
        scaling_config=elastic.ScalingConfig(num_workers=1),
        run_config=elastic.RunConfig(
            name=name,
            storage_path=directory,
            snapshots=elastic.SnapshotConfig(interval=f"{EVERY_STEPS} steps", remote_every=1, replicas=0),
        ),
    )
    stop = threading.Event()
    keeper = threading.Thread(target=pin, args=(stop,))
    if pinned:
        keeper.start()
    try:
        result = trainer.fit()
    finally:
        stop.set()
        if pinned:
            keeper.join()
    if result.error is not None:
        raise result.error
    drains = []
    began: dict[str, float] = {}
    for record in journal_records(open_store(directory), name):
        if record["kind"] == "snapshot" and record["purpose"] == "periodic":
            began[record["attempt"]] = record["t"] - record["drain_s"]
        elif record["kind"] == "durable" and record["attempt"] in began:
            drains.append((began[record["attempt"]], record["t"]))
    rows = [(row["ended_at_s"] - row["took_s"], row["ended_at_s"], row["took_s"]) for row in result.metrics]
    beside = [took for start, end, took in rows if any(start < last and end > first for first, last in drains)]
    alone = [took for start, end, took in rows if not any(start < last and end > first for first, last in drains)]
    if not beside or not alone:
        raise RuntimeError(f"{len(beside)} steps beside a snapshot and {len(alone)} alone: take more --steps")
    return {
        "kept": round(statistics.median(alone) / statistics.mean(beside), 3),
        "alone_ms": round(1e3 * statistics.median(alone), 3),
        "beside_ms": round(1e3 * statistics.mean(beside), 3),
        "worst_ms": round(1e3 * max(beside), 3),
        "steps_beside": len(beside),
        "drain_s": round(statistics.median(last - first for first, last in drains), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="little state and few steps")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    mib, steps = (32, 1000) if options.quick else (options.mib, options.steps)
    cores = len(os.sched_getaffinity(0))
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    found: dict[str, dict[str, float]] = {}
    try:
        with tempfile.TemporaryDirectory() as directory:
            print(f"{cores} cores")
            print(f"{'':>7} {'kept':>6} {'alone':>9} {'beside':>9} {'worst':>9} {'steps':>6} {'drain':>8}")
            for name in ("free", "pinned") if cores > 1 else ("free",):
                row = found[name] = kept(name == "pinned", mib, steps, directory)
                print(
                    f"{name:>7} {row['kept']:>6.3f} {row['alone_ms']:>6.2f} ms {row['beside_ms']:>6.2f} ms "
                    f"{row['worst_ms']:>6.2f} ms {row['steps_beside']:>6} {row['drain_s']:>6.2f} s",
                    flush=True,
                )
    finally:
        ray.shutdown()
    if options.json:
        print(json.dumps({"kept": {name: row["kept"] for name, row in found.items()}, "runs": found, "cores": cores}))


if __name__ == "__main__":
    main()
