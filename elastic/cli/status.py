"""``elastic status``: a run now, from its controller; or from storage, when none answers."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from elastic.cli.connect import run_handle
from elastic.cli.local_runs import local_runs
from elastic.cli.nodes import node_state
from elastic.cli.output import command, count, number, print_json, seconds
from elastic.cli.progress import figures, told, told_notice
from elastic.cli.run_settings import absolute
from elastic.errors import ClusterError, ConfigError


def register(app: typer.Typer) -> None:
    """Add ``status`` to the command line."""
    app.command("status", help="A run now: live from any terminal, or from its storage.")(command(status))


def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Not needed where there is only one.")] = None,
    address: Annotated[str | None, typer.Option("--address", help="The Ray cluster; default: the local one.")] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", help="Where the run is stored, for when no controller answers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """The live run; without a controller what storage tells."""
    try:
        with run_handle(address, run) as handle:
            now = handle.status()
    except ClusterError:
        known = absolute(storage) if storage else _storage_of(run)
        if not known:
            raise
        show_stored(known, run, as_json)
        return
    if as_json:
        print_json({"live": True, **now})
    else:
        for text in lines(now):
            print(text)


def _storage_of(run: str | None) -> str:
    return next((record.storage for record in local_runs() if run in (None, record.run)), "")


def lines(now: dict[str, Any]) -> list[str]:
    """A live run, in words."""
    found = [f"run {now['run']!r}: {_phase(now)}, after {seconds(now['wall_s'])}"]
    found += [f"  {name}: {value}" for name, value in figures(now)]
    if now["mesh"]:
        nodes = count(len({m["node"] for m in now["members"].values()}), "node")
        reason = now.get("mesh_reason", "")
        found.append(f"  mesh: {now['mesh']} on {nodes}{f' ({reason})' if reason else ''}")
    if now.get("restored"):
        found.append(f"  restored: {now['restored']['text']}")
    if now["interval"]:
        found.append(f"  interval: {now['interval']['reason']}")
    found += [f"  incident at {seconds(i['at_s'])}: {told(i)}" for i in now["incidents"][-5:]]
    found += [f"  notice: {told_notice(notice)}" for notice in now["notices"][-5:]]
    found += [f"  straggler: {straggler['text']}" for straggler in now["stragglers"][-5:]]
    states = {node["node"][:12]: node_state(node) for node in now["node_list"]}
    found += [f"  node {name}: {', '.join(state)}" for name, state in states.items() if state]
    found += [f"  alarm: {alarm}" for alarm in now["alarms"][-5:]]
    return found


def _phase(now: dict[str, Any]) -> str:
    return f"{now['result']['status']} ({now['result']['reason']})" if now["result"] else str(now["phase"])


def show_stored(storage: str, run: str | None, as_json: bool) -> None:
    """The run as its journal and markers tell of it."""
    from elastic.observe.history import read_history, runs_in
    from elastic.storage.blob_store import open_store

    store = open_store(storage)
    if run is None:
        names = runs_in(store)
        if len(names) != 1:
            cure = f"it holds {', '.join(names)}; name one" if names else "it holds none"
            raise ConfigError("RUN", None, f"say which run of {storage}: {cure}")
        run = names[0]
    history = read_history(store, run)
    if as_json:
        print_json({"live": False, **history.to_json()})
        return
    ended = f"{history.ended} ({history.reason})" if history.ended else "not answering, and never said that it ended"
    ago = f", last heard of {seconds(max(0.0, time.time() - history.last_word_at_s))} ago"
    print(f"run {run!r}: {ended}{ago if history.last_word_at_s else ''}")
    print(f"  step: {history.step:,}")
    for name, value in history.metrics.items():
        print(f"  {name}: {number(value)}")
    if history.generation:
        print(f"  generation: {history.generation}, {count(history.world_size, 'rank')} ({history.mesh})")
    print(f"  started: {count(history.starts, 'time')}, {count(len(history.incidents), 'incident')}")
    if history.durable:
        steps = ", ".join(f"{ref.step:,}" for ref in history.durable)
        print(f"  durable snapshots: step {steps} in {history.storage}/{run}/snapshots")
    else:
        print("  durable snapshots: none")
    for alarm in history.alarms[-5:]:
        print(f"  alarm: {alarm}")
    for damage in history.unreadable:
        print(f"  damaged: {damage}")
