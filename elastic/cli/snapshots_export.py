"""``elastic snapshots export``: a snapshot as safetensors files or as a DCP directory, with a small memory."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from elastic.cli.output import count, print_json, seconds
from elastic.cli.snapshots_find import WHICH, AsJson, RunName, Storage, find
from elastic.cli.snapshots_text import size
from elastic.cli.tune_units import size_bytes
from elastic.errors import ConfigError

SHOWN_FILES = 8


def export(
    which: Annotated[str, typer.Argument(metavar="STEP|ID", help=WHICH)] = "latest",
    form: Annotated[
        Literal["safetensors", "dcp"], typer.Option("--to", help="dcp is for torch.distributed.checkpoint.load.")
    ] = "safetensors",
    out: Annotated[str | None, typer.Option("--out", help="A directory that is new or empty.")] = None,
    names: Annotated[str, typer.Option("--names", help="Only tensors whose name begins so.")] = "",
    model_only: Annotated[
        bool, typer.Option("--model-only", help="Only the model, by the names that it has itself.")
    ] = False,
    shard_size: Annotated[str, typer.Option("--shard-size", help="Most bytes of a safetensors file.")] = "5GB",
    storage: Storage = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Write the tensors, every chunk checked. What is no tensor (learning rates, counters, data cursor) stays."""
    from elastic.snapshot.export import choose

    if out is None:
        raise ConfigError("--out", None, "name a directory to make")
    shard_bytes = int(size_bytes("--shard-size", shard_size))
    started = time.perf_counter()
    found = find(storage, run)
    ref = found.one(which)
    index, source = found.catalog.open(ref), found.catalog.source(ref)
    chosen = choose(index, names, model_only)
    if form == "dcp":
        from elastic.snapshot.export_dcp import export_dcp

        report = export_dcp(index, source, chosen, out)
    else:
        from elastic.snapshot.export_safetensors import export_safetensors

        report = export_safetensors(index, source, chosen, out, shard_bytes)
    took = time.perf_counter() - started
    if as_json:
        where = {"run": found.run, "step": ref.step, "id": ref.snapshot_id, "to": form}
        print_json({**where, **asdict(report), "seconds": took})
        return
    left = f", {count(report.left_out, 'other tensor')} left out" if report.left_out else ""
    print(
        f"step {ref.step:,} of run {found.run!r}: {count(report.tensors, 'tensor')}, {size(report.nbytes)}, "
        f"in {seconds(took)}{left}"
    )
    for name in report.files[:SHOWN_FILES]:
        print(f"  {report.directory}/{name}")
    if len(report.files) > SHOWN_FILES:
        print(f"  and {count(len(report.files) - SHOWN_FILES, 'more file')}")
    for note in report.notes:
        print(f"  {note}")
