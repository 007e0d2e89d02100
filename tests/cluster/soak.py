"""A run under random failures of all kinds, from one seed, against the same run with none.

python tests/cluster/soak.py --minutes 30 --seed 3

What must hold: the run finishes; every sample is consumed once; parameters and optimizer state are bitwise those of the
quiet run (the world size is fixed, so that a lost rank is replaced); no process, arena or open file is left over, and
no process that outlived the failures has grown.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.cluster import JOBS, TestCluster, test_cluster, until

import elastic
from actors.names import NAMESPACE
from elastic.observe.audit import audit_run
from elastic.storage.blob_store import open_store

WORLD = 4
RUN = "soak"
MEAN_S = 9.0
"""Between two failures; a recovery takes about one, or two with a cold replacement."""
STEP_S = 0.05
GROWTH_BYTES = 64 << 20
GROWTH_FILES = 24
SETTLED_S = 10.0
"""A process that has run for less, in seconds of a core, is still loading what it needs."""


@dataclass
class Sample:
    """What one process held: first when it had settled, and last."""

    kind: str
    first: tuple[int, int] | None = None
    last: tuple[int, int] = (0, 0)


@dataclass
class Report:
    """What a soak did and found wrong."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    incidents: int = 0
    generations: int = 0
    watched: int = 0
    """Processes that lived long enough to tell whether they grow."""
    wrong: list[str] = field(default_factory=list)


def soak(cluster: TestCluster, storage: str, seconds: float, seed: int) -> Report:
    """Train for about ``seconds`` while failures strike, then compare with the quiet run. Prints each failure."""
    report = Report(seed)
    draw = random.Random(seed)
    config = {"steps": int(seconds / (STEP_S + 0.03)), "dropout": 0.2, "samples": 1 << 20}
    quiet = _trainer("quiet", storage, config).fit()
    bomb = os.path.join(storage, "bomb")
    handle = _trainer(RUN, storage, {**config, "step_s": STEP_S, "bomb": bomb}).start()
    held: dict[tuple[int, float], Sample] = {}
    next_at, in_recovery = time.monotonic() + 2 * MEAN_S, False
    try:
        while (result := handle.poll(0.2)) is None:
            _look(held)
            if time.monotonic() < next_at:
                continue
            if not in_recovery and handle.status()["phase"] != "running":
                continue  # most failures strike a run at work, some one that recovers
            in_recovery = draw.random() < 0.2
            next_at = time.monotonic() + draw.expovariate(1 / MEAN_S)
            kind = draw.choice(tuple(FAULTS))
            report.faults[kind] += 1
            print(f"  step {handle.status()['step']:>6}  {kind}", flush=True)
            FAULTS[kind](cluster, draw, bomb)
            cluster.ensure(WORLD + 1)
    finally:
        handle.abandon()
    report.incidents, report.generations = len(result.incidents), len(result.generations)
    report.watched = sum(sample.first is not None for sample in held.values())
    if result.error is not None:
        report.wrong.append(f"the run failed: {result.error}")
        return report
    report.wrong += _differences(result, quiet) + _grown(held) + _left_over()
    return report


def _trainer(name: str, storage: str, config: dict[str, Any]) -> elastic.ElasticTrainer:
    return elastic.ElasticTrainer(
        f"{JOBS}:train",
        train_loop_config=config,
        scaling_config=elastic.ScalingConfig(num_workers=WORLD),
        run_config=elastic.RunConfig(
            name=name,
            storage_path=storage,
            snapshots=elastic.SnapshotConfig(interval=4.0),
            failures=elastic.FailureConfig(
                max_failures_without_progress=20,
                max_user_errors=1000,
                budgets=dict.fromkeys(("infrastructure", "preemption", "hang"), (1000, 1.0)),
            ),
        ),
    )


# --- failures --------------------------------------------------------------------------------------------------------


def _processes(title: str) -> list[psutil.Process]:
    """Living processes of this cluster with that title, oldest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.create_time(), process.pid, process))
        except psutil.Error:
            continue
    return [process for _, _, process in sorted(found)]


def _signal(title: str, number: int, draw: random.Random, count: int = 1) -> None:
    found = _processes(title)
    for process in draw.sample(found, min(count, len(found))):
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _rank_killed(cluster: TestCluster, draw: random.Random, bomb: str) -> None:
    _signal("ray::Rank", signal.SIGKILL, draw)


def _two_ranks_killed(cluster: TestCluster, draw: random.Random, bomb: str) -> None:
    _signal("ray::Rank", signal.SIGKILL, draw, 2)


def _rank_stopped(cluster: TestCluster, draw: random.Random, bomb: str) -> None:
    _signal("ray::Rank", signal.SIGSTOP, draw)


def _rank_told_to_end(cluster: TestCluster, draw: random.Random, bomb: str) -> None:
    _signal("ray::Rank", signal.SIGTERM, draw)


def _store_killed(cluster: TestCluster, draw: random.Random, bomb: str) -> None:
    _signal("ray::NodeStore", signal.SIGKILL, draw)


def _node_killed(cluster: TestCluster, draw: random.Random, bomb: str) -> None:
    cluster.kill_node(draw.choice(sorted(cluster.nodes)), RUN)


def _error_raised(cluster: TestCluster, draw: random.Random, bomb: str) -> None:
    Path(bomb).write_text(f"raise {draw.random()}")


def _process_exited(cluster: TestCluster, draw: random.Random, bomb: str) -> None:
    Path(bomb).write_text("exit")


FAULTS = {
    "rank killed": _rank_killed,
    "two ranks killed": _two_ranks_killed,
    "rank stopped": _rank_stopped,
    "rank told to end": _rank_told_to_end,
    "store killed": _store_killed,
    "node killed": _node_killed,
    "error raised": _error_raised,
    "process exited": _process_exited,
}


# --- what must hold --------------------------------------------------------------------------------------------------


def _differences(result: Any, quiet: Any) -> list[str]:
    wrong = []
    ours, theirs = result.load_state(), quiet.load_state()
    different = sorted(name for name in theirs if name not in ours or ours[name].tobytes() != theirs[name].tobytes())
    if different or ours.keys() != theirs.keys():
        wrong.append(f"{len(different)} tensors differ from the quiet run's: {different[:3]}")
    found = audit_run(open_store(result.storage), result.run)
    if found is None:
        wrong.append("there is nothing to audit")
    elif (found.audit.repeated, found.audit.skipped) != (0, 0):
        wrong.append(f"{found.audit.repeated} samples were repeated, {found.audit.skipped} skipped")
    return wrong


def _look(held: dict[tuple[int, float], Sample]) -> None:
    for title in ("ray::Rank", "ray::NodeStore", "ray::Controller"):
        for process in _processes(title):
            try:
                # Thousands of processes come and go, and pids come back.
                sample = held.setdefault((process.pid, process.create_time()), Sample(title))
                now = (process.memory_info().rss - process.memory_info().shared, process.num_fds())
                ran = process.cpu_times()
            except psutil.Error:
                continue
            if ran.user + ran.system >= SETTLED_S:
                sample.first = sample.first or now
                sample.last = now


def _grown(held: dict[tuple[int, float], Sample]) -> list[str]:
    wrong = []
    for (pid, _), sample in held.items():
        if sample.first is None:
            continue
        memory, files = (last - first for last, first in zip(sample.last, sample.first))
        if memory > GROWTH_BYTES:
            wrong.append(f"{sample.kind} {pid} grew by {memory >> 20} MiB")
        if files > GROWTH_FILES:
            wrong.append(f"{sample.kind} {pid} opened {files} files more")
    return wrong


def _left_over() -> list[str]:
    def left() -> list[str]:
        actors = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
        actors = [name for name in actors if f":{RUN}:" in name]
        arenas = [str(path) for path in Path("/dev/shm").glob(f"elastic-{RUN}-*")]
        processes = [title for title in ("ray::Rank", "ray::NodeStore") if _processes(title)]
        return actors + arenas + processes

    try:
        until(lambda: not left(), 20, "everything of the run to end")
    except AssertionError:
        return [f"left over: {', '.join(left())}"]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes")
    with test_cluster(WORLD + 1) as cluster, tempfile.TemporaryDirectory() as storage:
        report = soak(cluster, storage, 60 * arguments.minutes, arguments.seed)
    print(f"{sum(report.faults.values())} failures {dict(report.faults)}, {report.incidents} incidents,")
    print(f"{report.generations} generations, {report.watched} processes watched; ", end="")
    print("all is well" if not report.wrong else "; ".join(report.wrong))
    raise SystemExit(bool(report.wrong))


if __name__ == "__main__":
    main()
