"""Goodput under a failure every 30 s on average, beside Ray Train on the same job, machine and schedule.

    python tests/benchmarks/goodput.py [--quick] [--json] [--seconds 300] [--mean 30] [--seed 6] [--systems ours,...]

Four ranks of one CPU on four raylets of this machine, elastic down to two, train the toy job of ``toy_job.py``. A
seeded schedule, the same for both systems, kills a rank or (one time in four) a node, which comes back 10 s later; its
memory dies with it. A failure that is due while no rank lives, or that would leave fewer nodes than ranks are needed,
strikes nothing, and is told as such. Ray Train may fail as often as it likes and takes a checkpoint every 50 steps;
ours keeps its defaults.

Goodput is the time from having a batch to the end of its optimizer step, summed over the steps of the surviving
trajectory, over the time since the first batch: counted from what the ranks wrote down, alike for both. Fetching data,
snapshots and checkpoints count against it. Samples repeated or skipped are, for ours, what the audit of the run's own
ledger finds, and for Ray Train what its ranks wrote down, against the order of its sampler.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from failing_runs import SYSTEMS, FailingRun, failing_run, known_timers, prepare_process, say, some_of
from rich.console import Console
from rich.table import Table
from step_log import recovery, samples_of, trajectory
from toy_job import CHECKPOINT_EVERY, STEP_S, sampled_order

RANKS = 4
LEAST = 2
NODE_SHARE = 0.25
NODE_BACK_S = 10.0
QUIET_S = 5.0
"""No failure so shortly before the end: its recovery could not be seen."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``at_s`` after the first batch; ``pick`` in [0, 1) chooses among the ranks or nodes that there are by then."""

    at_s: float
    kind: str
    pick: float


@dataclass(frozen=True, slots=True)
class Came:
    """What a system made of it."""

    goodput: float
    steps: int
    steps_redone: int
    repeated: int
    skipped: int
    struck: int
    missed: int
    recovery_s: float
    """Median over the failures that struck, to the first new step."""


def schedule(seed: int, seconds: float, mean_s: float) -> Iterator[Failure]:
    """Failures with exponential times between them."""
    draw = random.Random(seed)
    at = draw.expovariate(1 / mean_s)
    while at < seconds - QUIET_S:
        yield Failure(at, "node" if draw.random() < NODE_SHARE else "rank", draw.random())
        at += draw.expovariate(1 / mean_s)


def strike(run: FailingRun, failure: Failure) -> float | None:
    """Kill what is due; when, or None if it struck nothing."""
    if failure.kind == "rank":
        ranks = run.ranks()
        return run.kill_rank(ranks[int(failure.pick * len(ranks))].pid) if ranks else None
    if len(run.nodes) <= LEAST:
        return None
    return run.kill_node(run.nodes[int(failure.pick * len(run.nodes))])


def goodput_of(system: str, failures: list[Failure], seconds: float) -> Came:
    """One run of ``seconds`` from its first batch."""
    with failing_run(system, RANKS, (LEAST, RANKS), {}, max_failures=-1) as run:
        run.until_step(1)
        began = min(record.at for record in run.log.read() if record.kind == "took")
        until = began + seconds
        due: list[tuple[float, Failure | None]] = [(began + failure.at_s, failure) for failure in failures]
        struck: list[float] = []
        while due:
            at, failure = due.pop(0)
            run.goes_on_until(at)
            if failure is None:
                run.add_node()
                continue
            if (hit := strike(run, failure)) is None:
                say(f"{system}: the {failure.kind} failure at {failure.at_s:.0f} s struck nothing")
                continue
            struck.append(hit)
            say(f"{system}: a {failure.kind} was killed at {hit - began:.0f} s")
            if failure.kind == "node":
                due = sorted([*due, (hit + NODE_BACK_S, None)], key=lambda one: one[0])
        run.goes_on_until(until)
        records = list(run.log.read())
        kept = trajectory(records, until)
        if system == "ours":
            run.system.stop()
            audit = run.system.audit().audit
            repeated, skipped = audit.repeated, audit.skipped
        else:
            repeated, skipped = samples_of(records, kept, sampled_order())
        recovered = [found.to_first_step_s for at in struck if (found := recovery(records, at))]
        return Came(
            goodput=kept.time_in_steps_s / seconds,
            steps=len(kept.steps),
            steps_redone=kept.steps_redone,
            repeated=repeated,
            skipped=skipped,
            struck=len(struck),
            missed=len(failures) - len(struck),
            recovery_s=statistics.median(recovered) if recovered else 0.0,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 12 s of ours, a failure every 4 s")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("--seconds", type=float, default=300.0, help="from the first batch, each system")
    parser.add_argument("--mean", type=float, default=30.0, help="seconds between failures, on average")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--systems", type=some_of(SYSTEMS), default=list(SYSTEMS))
    arguments = parser.parse_args()
    prepare_process()
    seconds, mean_s, systems = arguments.seconds, arguments.mean, arguments.systems
    if arguments.quick:
        seconds, mean_s, systems = 12.0, 4.0, ["ours"]
    timers = known_timers(systems)
    failures = list(schedule(arguments.seed, seconds, mean_s))
    nodes = sum(failure.kind == "node" for failure in failures)
    say(f"{len(failures)} failures in {seconds:g} s, {nodes} of them of a node; seed {arguments.seed}")
    came = {}
    for system in systems:
        came[system] = goodput_of(system, failures, seconds)
    title = f"{len(failures)} failures in {seconds:g} s, {nodes} of a node"
    table = Table(title, "goodput", "steps", "redone", "repeated", "skipped", "struck", "recovery, s")
    for system, one in came.items():
        samples = [f"{one.repeated}", f"{one.skipped}"]
        steps = [f"{one.goodput:.3f}", f"{one.steps}", f"{one.steps_redone}"]
        table.add_row(system.replace("_", " "), *steps, *samples, f"{one.struck}", f"{one.recovery_s:.2f}")
    console = Console(width=100)
    console.print(table)
    console.print("target: ours ≥ 0.9 and above Ray Train; no sample of ours repeated or skipped")
    if arguments.json:
        result = {
            **{system: came[system].goodput if system in came else None for system in SYSTEMS},
            "details": {system: asdict(one) for system, one in came.items()},
            "failures": [asdict(failure) for failure in failures],
            "seed": arguments.seed,
            "seconds": seconds,
            "mean_s": mean_s,
            "timers": timers,
            "job": {"step_s": STEP_S, "checkpoint_every": CHECKPOINT_EVERY, "ranks": RANKS, "least": LEAST},
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
