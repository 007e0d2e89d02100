"""How the snapshot commands say things: sizes, ages, tables, and which failures a tier survives."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.storage.blob_store import BlobStore
from elastic.storage.local_blobs import LocalBlobs
from elastic.storage.memory_blobs import MemoryBlobs

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: float) -> str:
    """Bytes with three digits, in the unit that suits them."""
    unit = 0
    while nbytes >= 1023.5 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.3g} {_UNITS[unit]}" if unit and nbytes < 999.5 else f"{nbytes:.0f} {_UNITS[unit]}"


def age(seconds: float) -> str:
    """How long ago, in one unit."""
    for length, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """A table in lines; columns are aligned to the right, those in ``left`` to the left."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in (head, *rows)
    ]


def durable_survives(store: BlobStore) -> tuple[str, ...]:
    """Losses that a durable snapshot in ``store`` outlives, in words."""
    if isinstance(store, MemoryBlobs):
        return ()
    if isinstance(store, LocalBlobs):
        return ("process", "cluster", "node, unless the directory is on that node's own disk")
    return ("process", "node", "cluster")


def memory_survives(copies: int) -> tuple[str, ...]:
    """Losses that a snapshot in node memory outlives when ``copies`` nodes hold each share of it."""
    return ("process", "node") if copies > 1 else ("process",)
