"""Which boxes of a tensor lie in which pack: its chunks, joined where they continue one another. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.layout import Box


@dataclass(frozen=True, slots=True)
class WrittenBox:
    """A box of a tensor as it lies in one pack, in ``chunks`` chunks."""

    box: Box
    pack: str
    chunks: int


def written_boxes(table: ChunkTable) -> dict[str, list[WrittenBox]]:
    """For each tensor its boxes, in the order of their offsets. A tensor without elements has none."""
    found: dict[str, list[WrittenBox]] = {spec.name: [] for spec in table.specs}
    order = np.lexsort(np.stack([table.pack_id, table.tensor_id]))
    pairs = np.stack([table.tensor_id[order], table.pack_id[order]], axis=1)
    heads = np.flatnonzero(np.diff(pairs, axis=0, prepend=-1).any(axis=1)).tolist() if len(order) else []
    for start, stop in zip(heads, [*heads[1:], len(order)]):
        tensor, pack = pairs[start].tolist()
        parts = joined((table.box(row), 1) for row in order[start:stop].tolist())
        found[table.specs[tensor].name] += [WrittenBox(box, table.packs[pack], chunks) for box, chunks in parts]
    for boxes in found.values():
        boxes.sort(key=lambda written: written.box.offset)
    return found


def joined(boxes: Iterable[tuple[Box, int]]) -> list[tuple[Box, int]]:
    """Fewer, larger boxes that cover the same, with their counts added up: neighbours along a dimension that agree in
    all others become one, the innermost dimension first."""
    parts = list(boxes)
    dims = len(parts[0][0].shape) if parts else 0
    for dim in reversed(range(dims)):
        parts.sort(key=lambda part: (_across(part[0], dim), part[0].offset[dim]))
        merged: list[tuple[Box, int]] = []
        for box, count in parts:
            last, held = merged[-1] if merged else (None, 0)
            if (
                last is not None
                and _across(last, dim) == _across(box, dim)
                and last.offset[dim] + last.shape[dim] == box.offset[dim]
            ):
                shape = list(last.shape)
                shape[dim] += box.shape[dim]
                merged[-1] = (Box(last.offset, tuple(shape)), held + count)
            else:
                merged.append((box, count))
        parts = merged
    return parts


def _across(box: Box, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of a box on all dimensions but ``dim``."""
    return box.offset[:dim] + box.offset[dim + 1 :], box.shape[:dim] + box.shape[dim + 1 :]
