"""How soon a run goes on after a failure, and what it loses, beside Ray Train on the same job, machine and failure.

    python tests/benchmarks/recovery.py [--quick] [--json] [--repeat 3] [--scenarios rank_kill,...] [--systems ours,...]

Every try has its own private cluster (several raylets on this machine, one rank each) and trains the toy job of
``toy_job.py``, whose ranks write down each step that they took: all times and lost steps are read from there, on both
sides alike, from the moment of the kill to the end of the first new step's optimizer. Failures strike 25 steps after a
checkpoint of Ray Train, the average of one every 50; ours keeps its defaults. The systems take turns.

    rank_kill     SIGKILL to a rank. Ours goes on with the others at once (2 to 3 ranks); Ray Train has a fixed world
                  of 3, so that nothing but the process has to be replaced
    rank_spare    the same, ours with a fixed world of 3 and one hot spare on a fourth node
    rank_replace  the same, ours with a fixed world of 3 and nothing that stands by: a new process
    node_kill     SIGKILL to a node, raylet and all, of an elastic run of 2 to 3 ranks; its memory dies with it
    node_add      a third node joins an elastic run of 2 to 3 ranks; ``stall_s`` is from the last step before to the
                  first step after, that step included. Ray Train looks for nodes every 5 s here; its default is 60 s
    bug           a ValueError at step 20 in every attempt: from the first raise until the run has ended. Ray Train may
                  fail 3 times

The split of our recovery comes from the incident records in the run's journal; ``unseen_s`` is what the ranks measured
beyond it: until the first sign of the failure reached the controller.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from failing_runs import START_S, SYSTEMS, FailingRun, Workers, failing_run, known_timers, prepare_process, say, some_of
from rich.console import Console
from rich.table import Table
from toy_job import CHECKPOINT_EVERY, GLOBAL_BATCH, STEP_S

RANKS = 3
ELASTIC = (RANKS - 1, RANKS)
STRIKE_AFTER = CHECKPOINT_EVERY + CHECKPOINT_EVERY // 2
QUICK_STRIKE_AFTER = 20
BUG_AT = 20
BUG_MAX_FAILURES = 3
LOOK_FOR_NODES_EVERY_S = 5.0
SPLIT = ("unseen_s", "detect_s", "salvage_s", "place_s", "decide_s", "form_s", "restore_s", "first_step_s")


@dataclass(frozen=True, slots=True)
class Try:
    """What one try came to. ``seconds`` is what the scenario is about."""

    seconds: float
    steps_lost: int = 0
    to_first_step_s: float = 0.0
    attempts: int = 0
    """Of the bug."""
    rung: str = ""
    restored_from: str = ""
    split: dict[str, float] = field(default_factory=dict)


def rank_kill(run: FailingRun) -> Try:
    return struck(run, run.kill_rank(run.ranks()[-1].pid))


def rank_spare(run: FailingRun) -> Try:
    run.until(run.system.warm, START_S, "a warm spare")
    return rank_kill(run)


def node_kill(run: FailingRun) -> Try:
    return struck(run, run.kill_node(run.ranks()[-1].node))


def struck(run: FailingRun, at: float) -> Try:
    """A failure at ``at``, and for ours the incident that its journal tells of it."""
    found = run.until_recovered(at)
    seconds = found.to_first_step_s
    if run.system.name != "ours":
        return Try(seconds, found.steps_lost, seconds)
    run.until(run.system.incidents, 30, "the end of the incident")
    run.system.stop()
    (incident,) = run.system.incident_records()
    split = {"unseen_s": seconds - incident["rto_s"], **incident["split"]}
    return Try(
        seconds,
        found.steps_lost,
        seconds,
        rung=incident["rung"],
        restored_from=incident["restored_from"],
        split=split,
    )


def node_add(run: FailingRun) -> Try:
    found = run.until_recovered(run.add_node())
    return Try(found.stall_s, found.steps_lost, found.to_first_step_s)


def bug(run: FailingRun) -> Try:
    while run.system.ended(1.0) is None:
        pass
    ended_at = time.monotonic()
    raised = [record.at for record in run.log.read() if record.kind == "raised"]
    return Try(ended_at - raised[0], attempts=len(raised))


@dataclass(frozen=True, slots=True)
class Scenario:
    """``workers`` of either system; one that is left out is not tried, ``against`` names the scenario that has it."""

    title: str
    act: Callable[[FailingRun], Try]
    workers: dict[str, Workers]
    nodes: int = RANKS
    target: str = ""
    against: str = ""
    limits: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


SCENARIOS = {
    "rank_kill": Scenario("rank killed", rank_kill, {"ours": ELASTIC, "ray_train": RANKS}, target="≥ 5, ≤ 2 s"),
    "rank_spare": Scenario(
        "rank killed, spare",
        rank_spare,
        {"ours": RANKS},
        nodes=RANKS + 1,
        target="≥ 5, ≤ 2 s",
        against="rank_kill",
        limits={"spares": 1},
    ),
    "rank_replace": Scenario("rank killed, no spare", rank_kill, {"ours": RANKS}, against="rank_kill"),
    "node_kill": Scenario("node killed", node_kill, {"ours": ELASTIC, "ray_train": ELASTIC}, target="≥ 20, ≤ 4 s"),
    "node_add": Scenario(
        "node added: stall",
        node_add,
        {"ours": ELASTIC, "ray_train": ELASTIC},
        nodes=RANKS - 1,
        target="≤ 1.5 s",
        config={"look_for_nodes_every_s": LOOK_FOR_NODES_EVERY_S},
    ),
    "bug": Scenario(
        "bug: time to the end",
        bug,
        {"ours": RANKS, "ray_train": RANKS},
        target="≥ 3",
        limits={"max_failures": BUG_MAX_FAILURES},
        config={"bug_at": BUG_AT},
    ),
}


def attempt(name: str, system: str, turn: int, turns: int, strike_after: int) -> Try:
    """One try of one system. ``turn`` of ``turns`` says where within a step the event falls."""
    scenario = SCENARIOS[name]
    with failing_run(system, scenario.nodes, scenario.workers[system], scenario.config, **scenario.limits) as run:
        if "bug_at" not in scenario.config:
            run.until_step(strike_after)
            time.sleep(STEP_S * turn / turns)  # no wait for anything: steps are struck early, midway and late
        return scenario.act(run)


def apart(*arguments: Any) -> Try:
    """``attempt`` in a process of its own: Ray's driver does not bear many clusters in one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=prepare_process) as process:
        return process.submit(attempt, *arguments).result()


def summary(name: str, tries: dict[str, list[Try]], peers: list[Try]) -> dict[str, Any]:
    """The keys of one scenario: medians of the tries, and every one of them. ``peers`` are Ray Train's of the scenario
    that it is compared with."""
    median = {system: statistics.median(one.seconds for one in came) for system, came in tries.items()}
    found: dict[str, Any] = {}
    for system, came in tries.items():
        prefix = "" if system == "ours" else f"{system}_"
        if name == "node_add":
            found[f"{prefix}stall_s"] = median[system]
            found[f"{prefix}to_first_step_s"] = statistics.median(one.to_first_step_s for one in came)
        else:
            found[f"{system}_s"] = median[system]
        if name == "bug":
            found[f"{prefix}attempts"] = max(one.attempts for one in came)
        else:
            found[f"{prefix}steps_lost"] = max(one.steps_lost for one in came)
        found[f"{system}_tries"] = [asdict(one) for one in came]
    if peers and "ours" in median:
        found["speedup"] = statistics.median(one.seconds for one in peers) / median["ours"]
    ours = tries.get("ours", [])
    if ours and ours[0].split:
        found["rung"] = ", ".join(sorted({one.rung for one in ours}))
        found["split"] = {part: statistics.median(one.split[part] for one in ours) for part in SPLIT}
    return found


def cells_of(name: str, came: list[Try]) -> tuple[str, str]:
    """Median and range in seconds, and what each try lost."""
    if not came:
        return "", ""
    values = sorted(one.seconds for one in came)
    seconds = f"{statistics.median(values):.2f} ({values[0]:.2f}..{values[-1]:.2f})"
    if name == "bug":
        return seconds, f"{max(one.attempts for one in came)} attempts"
    return seconds, "/".join(str(one.steps_lost) for one in came)


def tables(tries: dict[str, dict[str, list[Try]]], result: dict[str, Any]) -> Iterable[Table]:
    """What people read."""
    columns = ("ours, s", "steps lost", "Ray Train, s", "steps lost", "÷", "target")
    table = Table("", *columns, title="medians (and ranges)")
    for name, of in tries.items():
        cells = [cell for system in SYSTEMS for cell in cells_of(name, of.get(system, []))]
        ratio = result[name].get("speedup")
        table.add_row(SCENARIOS[name].title, *cells, f"{ratio:.1f}" if ratio else "", SCENARIOS[name].target)
    yield table
    splits = {name: found for name, found in result.items() if "split" in found}
    if splits:
        titles = [f"{SCENARIOS[name].title}: {found['rung']}" for name, found in splits.items()]
        table = Table("ours, s", *titles, title="where the time went, medians")
        for part in SPLIT:
            cells = [f"{found['split'][part]:.2f}" for found in splits.values()]
            table.add_row(part.removesuffix("_s").replace("_", " "), *cells)
        yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: one rank kill, ours only")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("--repeat", type=int, default=3, help="tries of each scenario and system")
    parser.add_argument("--scenarios", type=some_of(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--systems", type=some_of(SYSTEMS), default=list(SYSTEMS))
    arguments = parser.parse_args()
    prepare_process()
    names, systems, repeat = arguments.scenarios, arguments.systems, arguments.repeat
    strike_after = STRIKE_AFTER
    if arguments.quick:
        names, systems, repeat, strike_after = ["rank_kill"], ["ours"], 1, QUICK_STRIKE_AFTER
    timers = known_timers(systems)
    tries: dict[str, dict[str, list[Try]]] = {}
    for name in names:
        tries[name] = {system: [] for system in systems if system in SCENARIOS[name].workers}
        for turn in range(repeat):
            for system, came in tries[name].items():
                came.append(apart(name, system, turn, repeat, strike_after))
                say(f"{name} {turn + 1}/{repeat}, {system}: {came[-1]}")
    result: dict[str, Any] = {}
    for name, of in tries.items():
        peers = tries.get(SCENARIOS[name].against or name, {}).get("ray_train", [])
        result[name] = summary(name, of, peers)
    console = Console(width=110)
    for table in tables(tries, result):
        console.print(table)
    for system, known in timers.items():
        console.print(f"timers of {system}: {', '.join(f'{name} {value}' for name, value in known.items())}")
    if arguments.json:
        job = {"step_s": STEP_S, "global_batch": GLOBAL_BATCH, "checkpoint_every": CHECKPOINT_EVERY}
        print(json.dumps({**result, "timers": timers, "job": job, "repeat": repeat, "quick": arguments.quick}))


if __name__ == "__main__":
    main()
