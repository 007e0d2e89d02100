"""``elastic tokens``: text files into Parquet tokens."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from elastic.errors import ElasticError


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("tokens")(tokens)


def tokens(
    inputs: Annotated[list[Path] | None, typer.Argument(metavar="INPUT...", help="Text files or directories.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Directory to make; it must not hold anything.")] = None,
    glob: Annotated[str, typer.Option("--glob", help="Which files to take from directories.")] = "**/*",
    tokenizer: Annotated[str, typer.Option("--tokenizer", help='"bytes", or "package.module:function".')] = "bytes",
    vocabulary_size: Annotated[int | None, typer.Option("--vocabulary-size", help="For a function: its size.")] = None,
    end_token: Annotated[int | None, typer.Option("--end-token", help="Token behind each document.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make Parquet token files from text, one document a file.

    Read them with elastic.TokenDataset(DIR, sequence_length), or pack them with elastic.PackedDataset.
    """
    from elastic.data.token_writing import write_tokens
    from elastic.errors import ConfigError

    started = time.perf_counter()
    try:
        if out is None:
            raise ConfigError("--out", None, "say which directory to make")
        summary = write_tokens(
            inputs or [], out, glob=glob, tokenizer=tokenizer, vocabulary_size=vocabulary_size, end_token=end_token
        )
    except ElasticError as error:
        if as_json:
            print(json.dumps({"error": str(error), "kind": type(error).__name__}))
        else:
            print(f"elastic tokens: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    seconds = time.perf_counter() - started
    if as_json:
        print(json.dumps({"out": str(out), "seconds": round(seconds, 3), **asdict(summary)}))
    else:
        files = f"{len(summary.files)} file{'s' if len(summary.files) > 1 else ''}"
        print(
            f"{summary.documents:,} documents, {summary.tokens:,} tokens (vocabulary {summary.vocabulary_size:,}) "
            f"in {files} under {out}, {seconds:.1f} s"
        )
