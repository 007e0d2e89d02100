"""Real text that every machine with Python has: the sources of its standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from elastic.data.token_writing import TokenSummary, write_tokens
from elastic.errors import ConfigError


def write_library_tokens(out: str) -> TokenSummary:
    """The top-level modules of the standard library, one document each, as byte tokens in ``out``.

    Raises ConfigError where this Python comes without its sources."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(library.glob("*.py"))
    if len(sources) < 50:
        raise ConfigError("text", str(library), "this Python comes without the sources of its library; use another")
    return write_tokens(sources, out)
