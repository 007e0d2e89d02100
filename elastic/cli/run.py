"""``elastic run``: a train function on an elastic set of ranks, here or on an existing cluster."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic._siblings import sibling
from elastic.cli.connect import is_here, use_local_token
from elastic.cli.local_runs import announced, local_runs
from elastic.cli.logs import Reader
from elastic.cli.output import EXIT_INTERRUPTED, command, explain, print_json
from elastic.cli.progress import PlainProgress, progress
from elastic.cli.run_settings import RunSettings, read_file, settings_from
from elastic.cli.summary import summary
from elastic.errors import ClusterError, ConfigError, ElasticError, TrainingFailed

if TYPE_CHECKING:
    from actors.launch import RunHandle
    from elastic.result import Result

POLL_S = 0.25
LET_READ_S = 1.0
"""Whoever stopped the run from elsewhere reads its result before the controller goes."""
_LOADING = re.compile(r"actors.entry\.py$|elastic.cli.run\.py$|^<frozen ")

_SIZE, _SNAPSHOTS, _WHERE = "Size", "Snapshots", "Where"


def register(app: typer.Typer) -> None:
    """Add ``run`` to the command line."""
    app.command("run", help="Train: SCRIPT.py:function or package.module:function.")(command(run))


def run(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT.py:FUNCTION", help="Or package.module:function.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option("--workers", metavar="N|MIN:MAX", help="Ranks.", rich_help_panel=_SIZE)
    ] = None,
    resources: Annotated[
        str | None, typer.Option("--resources", help="Of one rank: CPU=1,GPU=1.", rich_help_panel=_SIZE)
    ] = None,
    spares: Annotated[
        int | None,
        typer.Option("--hot-spares", metavar="N", help="Warm ranks that stand by.", rich_help_panel=_SIZE),
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="One GPU a rank.", rich_help_panel=_SIZE)] = False,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            "--mesh",
            help="Axes, outermost first: dp=-1,tp=2; -1 takes what is left. Again for each other allowed mesh.",
            rich_help_panel=_SIZE,
        ),
    ] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", help="Directory or s3://BUCKET/PREFIX.", rich_help_panel=_WHERE)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="The run's; the same name and storage again resumes it.", rich_help_panel=_WHERE),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", help="An existing Ray cluster; without it one is started.", rich_help_panel=_WHERE),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="With --address: start it and return.", rich_help_panel=_WHERE)
    ] = False,
    interval: Annotated[
        str | None,
        typer.Option("--interval", help='auto, young, daly, 45s, 10m or "100 steps".', rich_help_panel=_SNAPSHOTS),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", help="Copies on a peer node: 0 or 1.", rich_help_panel=_SNAPSHOTS)
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option("--keep", help="Durable snapshots that are kept: N, or rules with |.", rich_help_panel=_SNAPSHOTS),
    ] = None,
    restore: Annotated[
        str | None,
        typer.Option("--restore", help="strict, training or weights: what is taken up.", rich_help_panel=_SNAPSHOTS),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--start-from", help="A new run begins with this: [STORAGE/]RUN[@STEP].", rich_help_panel=_SNAPSHOTS
        ),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept", metavar="VERSION", help="May differ although strict: code, torch, …", rich_help_panel=_SNAPSHOTS
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the ranks' generators.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML or TOML; flags beat it.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Into the train function's config.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:
    """Train. Ctrl-C stops at the next boundary with a snapshot; a second one leaves at once."""
    settings = settings_from(
        script,
        read_file(config) if config else {},
        workers=workers,
        storage=storage,
        name=name,
        resources=resources,
        hot_spares=spares,
        mesh=mesh or (),
        interval=interval,
        replicas=replicas,
        keep=keep,
        seed=seed,
        restore=restore,
        start_from=start_from,
        accept=accept or (),
        gpu=gpu,
        assignments=assignments or (),
        address=address,
    )
    if detach and not settings.address:
        raise ConfigError("--detach", True, "needs --address: a local cluster ends with this command")
    settings = replace(settings, target=_placed(settings.target, bool(settings.address)))
    _load(settings.target)
    if settings.address:
        result, interrupted = _on_cluster(settings, detach, as_json)
    else:
        result, interrupted = _locally(settings)
    if result is not None:
        end(result, as_json, interrupted)


def end(result: Result, as_json: bool, interrupted: bool) -> None:
    """Tell what the run came to, and end with the exit code that says so."""
    if as_json:
        print_json(result.to_json())
    else:
        for text in summary(result):
            print(text)
    if result.error is not None:
        explain(result.error)
        raise typer.Exit(result.error.exit_code)
    if interrupted and result.status != "finished":
        raise typer.Exit(EXIT_INTERRUPTED)


def _placed(target: str, shipped: bool) -> str:
    """A script as the ranks find it: below the working directory where that is shipped, else by its full path."""
    place, separator, name = target.rpartition(":")
    if not place.endswith(".py"):
        return target
    full = os.path.abspath(place)
    below = os.path.relpath(full)
    return f"{below if shipped and not below.startswith('..') else full}{separator}{name}"


def _load(target: str) -> None:
    """Find the function before anything is started. Raises ConfigError, or TrainingFailed if the script raises."""
    load_function = sibling("actors.entry").load_function
    try:
        load_function(target)
    except ElasticError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise TrainingFailed(0, -1, text, _their_traceback(error), "while its module was loaded") from None


def _their_traceback(error: BaseException) -> str:
    """The traceback from the user's file on: how we came to load it is no news to them."""
    frames = traceback.TracebackException.from_exception(error)
    first = next((i for i, frame in enumerate(frames.stack) if not _LOADING.search(frame.filename)), len(frames.stack))
    frames.stack = traceback.StackSummary.from_list(list(frames.stack)[first:])
    return "".join(frames.format())


def _locally(settings: RunSettings) -> tuple[Result | None, bool]:
    for record in local_runs():
        if (record.run, record.storage) == (settings.run.name, settings.run.storage_path):
            raise ClusterError(
                f"run {record.run!r} is under way in process {record.pid}",
                f"stop it first: elastic stop {record.run}",
            )
    use_local_token(create=True)
    connection = sibling("actors.connection")
    most, each = settings.scaling.max_workers + settings.scaling.hot_spares, settings.scaling.resources
    cpus = max(math.ceil(most * each.get("CPU", 0)), os.cpu_count() or 1)
    own = {name: amount * most for name, amount in each.items() if name not in ("CPU", "GPU", "memory")}
    with show(settings) as display:
        address = connection.start_local(cpus, own)
        with (
            connection.arenas_removed(settings.run.snapshots.arena_directory, settings.run.name),
            announced(settings.run.name, settings.run.storage_path, address),
        ):
            _check_fits(settings, connection.total_resources())
            return follow(_launch(settings, None), display)


def _check_fits(settings: RunSettings, have: dict[str, float]) -> None:
    """A local cluster does not grow: what it lacks now it will always lack."""
    least = settings.scaling.min_workers
    for name, amount in settings.scaling.resources.items():
        if have.get(name, 0.0) + 1e-9 < least * amount:
            raise ClusterError(
                f"{least} ranks need {least * amount:g} {name}, this machine has {have.get(name, 0.0):g}",
                "ask for fewer ranks or resources, or name a cluster with --address",
            )


def _on_cluster(settings: RunSettings, detach: bool, as_json: bool) -> tuple[Result | None, bool]:
    if is_here(settings.address):
        use_local_token()
    connection = sibling("actors.connection")
    env = connection.shipped_code(os.getcwd(), (settings.run.storage_path,))
    with show(settings) as display:
        connection.connect(settings.address, env)
        try:
            handle = _launch(settings, None)
            if not detach:
                try:
                    return follow(handle, display)
                except KeyboardInterrupt:
                    handle.abandon()
                    raise
        finally:
            connection.disconnect()
    if as_json:
        print_json({"run": settings.run.name, "detached": True, "address": settings.address})
    else:
        print(f"run {settings.run.name!r} goes on: elastic status {settings.run.name} --address {settings.address}")
    return None, False


def _launch(settings: RunSettings, runtime_env: dict[str, Any] | None) -> RunHandle:
    handle: RunHandle = sibling("actors.launch").launch(
        settings.target, settings.train_loop_config, settings.scaling, settings.run, runtime_env
    )
    return handle


@contextlib.contextmanager
def show(settings: RunSettings) -> Iterator[PlainProgress]:
    """The display of a run, after a line that says what begins and where."""
    # Ray prints what happens to its nodes to stdout, which is for the answer.
    resumes = _resumes(settings)
    with contextlib.redirect_stdout(sys.stderr), progress(settings.run.name) as display:
        display.note(f"run {settings.run.name!r} in {settings.run.storage_path}{resumes}")
        yield display


def _resumes(settings: RunSettings) -> str:
    """From which step the run goes on. A storage that this machine cannot use is refused before anything is started,
    unless the run is on other machines, which may see it."""
    from elastic.snapshot.reader import SnapshotCatalog
    from elastic.storage.blob_store import open_store

    store = open_store(settings.run.storage_path)
    try:
        if not settings.address:
            store.check()
        refs = SnapshotCatalog(store, settings.run.name).restorable()
    except ElasticError:
        if settings.address:
            return ""
        raise
    start = settings.run.start_from
    new = f", a new run from {start}" if start else ", a new run"
    return f", resumes from step {refs[0].step:,}" if refs else new


def follow(handle: RunHandle, display: PlainProgress) -> tuple[Result, bool]:
    """Show the run to its end. Returns the result and whether it was interrupted; a second Ctrl-C raises
    KeyboardInterrupt."""
    reader = Reader(handle, 0, decisions=False)
    with graceful() as interrupts:
        stopping = False
        while (result := handle.poll(POLL_S)) is None:
            for line in reader.read():
                display.note(f"[rank 0] {line.text}")
            if interrupts.count and not stopping:
                stopping = True
                display.note("stopping at the next boundary, with a snapshot; Ctrl-C again leaves at once")
                handle.stop()
            with contextlib.suppress(ClusterError):  # too busy to answer is not dead: that, poll tells
                display.show(handle.status())
    with contextlib.suppress(ElasticError, OSError):  # a storage that only the run's machines see
        for line in reader.rest(result.storage):
            display.note(f"[rank 0] {line.text}")
    if result.status == "stopped" and not stopping:
        time.sleep(LET_READ_S)
    handle.close()
    return result, stopping


class Interrupts:
    """How often the user has asked to end."""

    count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt


@contextlib.contextmanager
def graceful() -> Iterator[Interrupts]:
    """While the block lasts, the first Ctrl-C or SIGTERM is only counted; the second raises KeyboardInterrupt."""
    interrupts = Interrupts()
    before = {number: signal.signal(number, interrupts) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
