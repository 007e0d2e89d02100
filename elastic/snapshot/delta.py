"""Which chunks of a share a durable snapshot must write, and which an older snapshot already holds. Pure.

A chunk is known by its checksum and length, so a chunk that moved to another rank or another place is found as well.
A tensor of which nearly everything changed is written whole: a few references would only keep an old pack alive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.protocol.shares import ALIGNMENT_BYTES
from elastic.snapshot.chunk_table import ChunkTable, Ints

GIVE_UP_UNCHANGED = 1 / 32
"""A tensor with a smaller part than this unchanged is written whole."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """``table`` says where each chunk is to be found; ``runs`` [n, 2] are the byte ranges of the share, start and end,
    that make up the new pack, each beginning in the pack at a multiple of ALIGNMENT_BYTES."""

    table: ChunkTable
    runs: Ints
    written_bytes: int
    referenced_bytes: int
    referenced: tuple[str, ...]

    @property
    def pack_bytes(self) -> int:
        """Bytes of the new pack; 0 means that none is written."""
        return int(_run_starts(self.runs)[-1])


def delta(table: ChunkTable, previous: ChunkTable | None, pack: str) -> Delta:
    """What of the share ``table`` (one pack) to write as ``pack``, given the chunk table of an older snapshot."""
    known = _find(table, previous)
    is_known = _drop_hopeless(table, known >= 0)
    written = np.flatnonzero(~is_known)
    written = written[np.argsort(table.byte_start[written], kind="stable")]
    starts, ends = table.byte_start[written], table.byte_start[written] + table.nbytes[written]
    # Two chunks stay in one run when only alignment lies between them; that is copied along.
    breaks = np.flatnonzero(starts[1:] - ends[:-1] >= ALIGNMENT_BYTES) + 1
    heads = np.concatenate(([0], breaks)).astype(np.int64)[: len(written)]
    tails = np.concatenate((breaks, [len(written)])).astype(np.int64)[: len(heads)] - 1
    runs = np.stack([starts[heads], ends[tails]], axis=1) if len(written) else np.zeros((0, 2), np.int64)
    run_of = np.searchsorted(heads, np.arange(len(written)), side="right") - 1

    byte_start, pack_id = table.byte_start.copy(), np.zeros(len(table), np.int32)
    byte_start[written] = _run_starts(runs)[run_of] + starts - runs[run_of, 0] if len(written) else starts
    packs: tuple[str, ...] = (pack,)
    if previous is not None and is_known.any():
        used, inverse = np.unique(previous.pack_id[known[is_known]], return_inverse=True)
        packs += tuple(previous.packs[i] for i in used.tolist())
        pack_id[is_known] = inverse + 1
        byte_start[is_known] = previous.byte_start[known[is_known]]
    return Delta(
        replace(table, packs=packs, pack_id=pack_id, byte_start=byte_start),
        runs,
        int(table.nbytes[written].sum()),
        int(table.nbytes[is_known].sum()),
        packs[1:],
    )


def _run_starts(runs: Ints) -> Ints:
    """Where each run begins in the pack, and at last where the pack ends."""
    lengths = runs[:, 1] - runs[:, 0]
    padded = -(-lengths // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    starts = np.concatenate(([0], np.cumsum(padded)))
    if len(lengths):
        starts[-1] += lengths[-1] - padded[-1]
    return starts


def _find(table: ChunkTable, previous: ChunkTable | None) -> Ints:
    """Row of ``previous`` with the same bytes, or -1."""
    if previous is None or previous.algorithm != table.algorithm or not len(previous) or not len(table):
        return np.full(len(table), -1, np.int64)
    theirs, ours = _keys(previous), _keys(table)
    order = np.argsort(theirs, kind="stable")
    at = np.minimum(np.searchsorted(theirs[order], ours), len(theirs) - 1)
    row = order[at]
    same = (theirs[row] == ours) & (previous.nbytes[row] == table.nbytes)
    return np.where(same, row, -1)


def _keys(table: ChunkTable) -> npt.NDArray[Any]:
    return np.ascontiguousarray(table.digest).view(f"V{table.digest.shape[1]}").ravel()


def _drop_hopeless(table: ChunkTable, is_known: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    total = np.bincount(table.tensor_id, weights=table.nbytes, minlength=len(table.specs))
    unchanged = np.bincount(table.tensor_id, weights=table.nbytes * is_known, minlength=len(table.specs))
    keep: npt.NDArray[np.bool_] = (unchanged >= total * GIVE_UP_UNCHANGED)[table.tensor_id]
    return is_known & keep
