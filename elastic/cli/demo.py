"""``elastic demo``: a real run on a private cluster of this machine that loses a node, goes on, and grows back."""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import tempfile
import threading
import time
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic._siblings import sibling
from elastic.cli.connect import use_local_token
from elastic.cli.demo_story import Story, Told
from elastic.cli.local_runs import announced
from elastic.cli.output import command, count, explain, print_json, seconds
from elastic.cli.progress import PlainProgress, progress, split_text
from elastic.cli.summary import first_and_last
from elastic.config import FailureConfig, RunConfig, ScalingConfig, SnapshotConfig
from elastic.errors import ConfigError, ElasticError

if TYPE_CHECKING:
    from elastic.observe.audit import RunAudit
    from elastic.result import Result

RUN = "demo"
KILLS = ("node", "rank", "none")
GLOBAL_BATCH_SIZE = 16
CONTEXT = 64
PACE_S = 0.04
INTERVAL_S = 2.0
FAILED = 1


def register(app: typer.Typer) -> None:
    """Add ``demo`` to the command line."""
    app.command("demo", help="See a run on this machine lose a node, go on, and grow back.")(command(demo))


def demo(
    kill: Annotated[str, typer.Option("--kill", help="node, rank or none.")] = "node",
    steps: Annotated[int, typer.Option("--steps", help="Steps to train.", min=20)] = 400,
    workers: Annotated[int, typer.Option("--workers", help="Ranks.", min=2, max=64)] = 4,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Nodes; default: one for each rank.", min=2)] = None,
    storage: Annotated[str | None, typer.Option("--storage", help="Default: a new temporary directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end.")] = False,
) -> None:
    """Train a small GPT on the sources of Python, with a failure in the middle, and prove that nothing was lost."""
    if kill not in KILLS:
        raise ConfigError("--kill", kill, f"use {', '.join(KILLS)}")
    if workers > GLOBAL_BATCH_SIZE:
        raise ConfigError("--workers", workers, f"the demo's global batch has {GLOBAL_BATCH_SIZE} samples; use fewer")
    began = time.monotonic()
    place = os.path.abspath(storage) if storage else tempfile.mkdtemp(prefix="elastic-demo-")
    try:
        # What Ray prints of a node that died is no news here, and stdout is for the answer.
        with contextlib.redirect_stdout(io.StringIO()), progress(RUN) as display:
            result, told = _train(kill, steps, workers, min(nodes or workers, workers), place, display)
            display.note("the private cluster has ended; auditing the ledger of the whole run")
    except KeyboardInterrupt:
        if not storage:
            shutil.rmtree(place, ignore_errors=True)
        raise
    audit = _audit(place)
    clean = audit is not None and audit.clean and result.status == "finished"
    if as_json:
        print_json(_json(result, told, audit, place, clean, time.monotonic() - began))
    else:
        for text in _summary(result, told, audit, place, time.monotonic() - began):
            print(text)
    if result.error is not None:
        explain(result.error)
        raise typer.Exit(result.error.exit_code)
    if not clean:
        raise typer.Exit(FAILED)


def _train(kill: str, steps: int, workers: int, nodes: int, place: str, display: PlainProgress) -> tuple[Result, Told]:
    each = math.ceil(workers / nodes)
    prepared = _Prepared(os.path.join(place, "tokens"))
    use_local_token(create=True)
    snapshots = SnapshotConfig(interval=INTERVAL_S)
    display.note(f"a private cluster of {nodes} nodes starts on this machine")
    local_cluster = sibling("actors.local_cluster")
    with local_cluster.PrivateCluster(each, run=RUN, arena_directory=snapshots.arena_directory) as cluster:
        for _ in range(nodes):
            cluster.add_node()
        display.note(prepared.wait())
        config = {
            "tokens": prepared.out,
            "context": CONTEXT,
            "global_batch_size": GLOBAL_BATCH_SIZE,
            "steps": steps,
            "lr": 2e-3,
            "warm_up_steps": max(1, min(50, steps // 5)),
            "pace_s": PACE_S,
        }
        display.note(f"{nodes} nodes are up; {workers} ranks start")
        handle = sibling("actors.launch").launch(
            "elastic.demo.train:train",
            config,
            ScalingConfig(num_workers=(max(1, workers - each), workers)),
            RunConfig(
                name=RUN, storage_path=place, snapshots=snapshots, failures=FailureConfig(wait_for_workers_s=60.0)
            ),
        )
        story = Story(cluster, handle, display, kill=kill, at_step=max(5, steps // 4))
        with announced(RUN, place, cluster.address):
            result = story.tell()
        handle.close()
    return result, story.told


class _Prepared:
    """Tokens are written, and torch is read from disk, while the cluster starts."""

    def __init__(self, out: str) -> None:
        self.out = out
        self._said = ""
        self._error: ElasticError | None = None
        self._thread = threading.Thread(target=self._prepare, daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        from elastic.demo.text import write_library_tokens

        try:
            if os.path.exists(self.out):
                self._said = f"the tokens in {self.out} are used again"
            else:
                made = write_library_tokens(self.out)
                self._said = f"{made.documents} sources of Python are {made.tokens:,} tokens in {self.out}"
        except ElasticError as error:
            self._error = error
        else:
            import elastic.demo.train  # noqa: F401

    def wait(self) -> str:
        """What was made. Raises what making it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._said


def _audit(place: str) -> RunAudit | None:
    from elastic.observe.audit import audit_run
    from elastic.storage.blob_store import open_store

    try:
        return audit_run(open_store(place), RUN)
    except ElasticError as error:
        explain(error)
        return None


def _json(result: Result, told: Told, audit: RunAudit | None, place: str, clean: bool, took_s: float) -> dict[str, Any]:
    whole = result.to_json()
    stalls = [snapshot.stall_s for snapshot in result.snapshots]
    first, last = first_and_last(result, 20).get("loss", (None, None))
    return {
        "clean": clean,
        "status": result.status,
        "step": result.step,
        "audit": audit.to_json() if audit else None,
        "incidents": whole["incidents"],
        "killed": told.killed,
        "killed_at_step": told.killed_at_step,
        "kill_to_first_step_s": told.kill_to_first_step_s,
        "grown_after_s": told.grown_after_s,
        "snapshots": {
            "node": len(stalls),
            "remote": sum(snapshot.remote for snapshot in result.snapshots),
            "stall_s_median": median(stalls) if stalls else None,
            "stall_s_max": max(stalls, default=None),
        },
        "loss": {"first": first, "last": last},
        "goodput": result.goodput,
        "steps_lost": result.steps_lost,
        "generations": whole["generations"],
        "took_s": took_s,
        "storage": place,
    }


def _summary(result: Result, told: Told, audit: RunAudit | None, place: str, took_s: float) -> list[str]:
    lines = ["", f"{result.status} at step {result.step:,} in {seconds(took_s)}, goodput {result.goodput:.1%}"]
    first, last = first_and_last(result, 20).get("loss", (math.nan, math.nan))
    lines.append(f"  loss         {first:.3f} → {last:.3f}")
    sizes = " → ".join(str(generation.world_size) for generation in result.generations)
    lines.append(f"  ranks        {sizes}")
    for incident in result.incidents:
        took = f"RTO {seconds(incident.rto_s)} ({split_text(incident.split)})"
        lines.append(f"  incident     {incident.kind} lost, {incident.rung}: {took}")
        lines.append(f"               {count(incident.steps_lost, 'step')} lost: back at step {incident.restored_step}")
    if told.kill_to_first_step_s is not None:
        lines.append(f"  from outside {seconds(told.kill_to_first_step_s)} from the kill to the first new step")
    if told.grown_after_s is not None:
        lines.append(f"  growing back {seconds(told.grown_after_s)}, the other ranks trained meanwhile")
    stalls = [snapshot.stall_s for snapshot in result.snapshots]
    if stalls:
        durable = sum(snapshot.remote for snapshot in result.snapshots)
        lines.append(
            f"  snapshots    {len(stalls)} in node memory, {durable} of them made durable; "
            f"stall {seconds(median(stalls))} (median), {seconds(max(stalls))} (worst)"
        )
    if audit is not None:
        found = audit.audit
        lines.append(
            f"  audit        {found.samples:,} samples in {found.steps:,} steps: {found.repeated} repeated, "
            f"{found.skipped} skipped{'' if audit.clean else '  ← NOT CLEAN'}"
        )
        lines += [f"               {fault}" for fault in found.faults[:5]]
    lines.append(f"  storage      {place}")
    lines.append(f"  look at it   elastic status {RUN} --storage {place}")
    return lines
