"""``elastic demo``."""

import typer


def register(app: typer.Typer) -> None:
    """Add ``demo`` to the command line."""
