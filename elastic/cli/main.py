"""The command line. Nothing here imports Ray or torch; a command does when it is called."""

from __future__ import annotations

from importlib import import_module

import typer

COMMANDS = ("run", "status", "logs", "resize", "stop", "nodes", "snapshots", "demo", "tune", "tokens")

EXIT_CODES = """\
Exit codes:

0 done

2 wrong call, flag or file

3 the train function raised; 93 the same error at the same step twice: do not start it again

4 a snapshot could not be made, or the storage refuses

5 the state cannot be restored

6 the cluster cannot carry the run, or there is no such run

70 a bug of ours; 130 interrupted
"""


def build() -> typer.Typer:
    """The application, with every command."""
    app = typer.Typer(
        name="elastic",
        help="Elastic, fault-tolerant PyTorch training on Ray that loses nothing.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_version)
    for name in COMMANDS:
        import_module(f"elastic.cli.{name}").register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from elastic import __version__

        print(__version__)
        raise typer.Exit


def _version(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    """Options of the command itself."""


def main() -> None:
    """The ``elastic`` command."""
    build()()


if __name__ == "__main__":
    main()
