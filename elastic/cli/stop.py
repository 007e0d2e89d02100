"""``elastic stop``: end a run at its next boundary, with a durable snapshot."""

from __future__ import annotations

from typing import Annotated

import typer

from elastic.cli.connect import run_handle
from elastic.cli.output import command, print_json
from elastic.cli.summary import summary
from elastic.errors import ClusterError


def register(app: typer.Typer) -> None:
    """Add ``stop`` to the command line."""
    app.command("stop", help="End a run at its next boundary, with a durable snapshot.")(command(stop))


def stop(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    address: Annotated[str | None, typer.Option("--address", help="The Ray cluster; default: the local one.")] = None,
    _snapshot: Annotated[bool, typer.Option("--snapshot", help="As always: the end of a run is durable.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the end.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:
    """Stop the run and wait until it has ended. Starting it again under its name resumes it."""
    with run_handle(address, run) as handle:
        handle.stop()
        result = handle.poll(timeout_s)
    if result is None:
        raise ClusterError(
            f"run {run!r} has not ended within {timeout_s:g} s", "it still will; wait longer with --timeout"
        )
    if as_json:
        print_json(result.to_json())
    else:
        for text in summary(result):
            print(text)
