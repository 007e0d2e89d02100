"""``elastic snapshots``: look into durable storage, check it, tidy it, and carry weights in and out.

None of it needs the job, its cluster or its code; what reads or writes torch's formats imports torch when called.
"""

from __future__ import annotations

import typer

from elastic.cli.output import command
from elastic.cli.snapshots_diff import diff
from elastic.cli.snapshots_export import export
from elastic.cli.snapshots_gc import gc, pin_snapshot, unpin_snapshot
from elastic.cli.snapshots_import import import_snapshot
from elastic.cli.snapshots_list import list_snapshots
from elastic.cli.snapshots_show import show
from elastic.cli.snapshots_verify import verify_snapshots

EXIT_CODES = """\
Exit codes: 0 done; 2 wrong call; 3 the train function of --resume raised; 4 the storage refuses; 5 damaged, not to be
had, or it does not resume as the error contract says; 6 no such run, or its ranks did not answer in time"""


def register(app: typer.Typer) -> None:
    """Add ``snapshots`` and what it can do to the command line."""
    group = typer.Typer(
        help="List, check, compare, keep, remove, export and import the snapshots of a run.",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    group.command("list", help="Every committed snapshot, and which failures it survives.")(command(list_snapshots))
    group.command("show", help="What one snapshot holds.")(command(show))
    group.command("verify", help="Whether they are whole, and resume; exit code 5 if not.")(command(verify_snapshots))
    group.command("diff", help="What changed from one snapshot to another, and by how much.")(command(diff))
    group.command("pin", help="Keep a snapshot whatever retention says.")(command(pin_snapshot))
    group.command("unpin", help="Leave a snapshot to retention again.")(command(unpin_snapshot))
    group.command("gc", help="Remove what no rule keeps and nothing needs.")(command(gc))
    group.command("export", help="Tensors as safetensors or as a DCP directory.")(command(export))
    group.command("import", help="Weights from elsewhere as a snapshot to start from.")(command(import_snapshot))
    app.add_typer(group, name="snapshots")
