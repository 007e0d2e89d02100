"""``elastic resize``: another number of ranks, at the next boundary, without losing a step."""

from __future__ import annotations

from typing import Annotated

import typer

from elastic.cli.connect import run_handle
from elastic.cli.output import command, count, print_json
from elastic.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add ``resize`` to the command line."""
    app.command("resize", help="Another number of ranks, without losing a step.")(command(resize))


def resize(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    workers: Annotated[int, typer.Argument(metavar="N", help="Ranks, within the run's minimum and maximum.")],
    address: Annotated[str | None, typer.Option("--address", help="The Ray cluster; default: the local one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Ask for ``workers`` ranks; the run takes as many of them as its mesh and the cluster allow."""
    if workers < 1:
        raise ConfigError("N", workers, "a run needs at least one rank; to end it: elastic stop")
    with run_handle(address, run) as handle:
        now = handle.status()
        wanted = handle.resize(workers)
    if as_json:
        print_json({"run": run, "asked": workers, "wanted": wanted, "world_size": now["world_size"]})
        return
    print(f"run {run!r} has {count(now['world_size'], 'rank')} and wants {wanted}")
    if wanted != workers:
        print(f"  not {workers}: that is outside of what the run was started with")
