"""Who writes what: a box that R ranks hold is written in R balanced parts, one by each. Pure.

The assignment follows from the layouts and the mesh alone, so every rank works out its own share without talking and
all shares together tile every tensor. Boxes with the same holders are laid end to end and the bytes are cut into R
near-equal ranges; a tensor at a border is cut along its first dimension that has more than one row, between rows. So
each piece is a box, at most R - 1 tensors of a group are cut, and shares differ by no more than one row.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from elastic.errors import CorruptSnapshot
from elastic.mesh import Mesh
from elastic.protocol.shares import ALIGNMENT_BYTES
from elastic.snapshot.layout import Box, Layout, TensorSpec, places

Held = tuple[tuple[str, int | tuple[int, ...]], ...]
NO_AXES: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor, row-major and contiguous at byte ``offset`` of the arena slot."""

    tensor: TensorSpec
    box: Box
    offset: int

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.tensor.itemsize


@dataclass(frozen=True, slots=True)
class SaveShare:
    """What one rank writes. ``nbytes`` is the extent of the slot it fills, gaps for alignment included.

    ``aliases`` holds (alias, canonical name) of tied tensors, which are written once. ``key`` names the share: the same
    key always means the same pieces.
    """

    key: str
    rank: int
    pieces: tuple[Piece, ...]
    nbytes: int
    aliases: tuple[tuple[str, str], ...] = ()

    def to_bytes(self) -> bytes:
        """The share as JSON columns; ``from_bytes`` gives it back."""
        specs: dict[TensorSpec, int] = {}
        tensor = [specs.setdefault(piece.tensor, len(specs)) for piece in self.pieces]
        columns = {
            "key": self.key,
            "rank": self.rank,
            "nbytes": self.nbytes,
            "aliases": self.aliases,
            "specs": [(spec.name, spec.dtype, spec.shape, spec.itemsize) for spec in specs],
            "tensor": tensor,
            "box_offset": [piece.box.offset for piece in self.pieces],
            "box_shape": [piece.box.shape for piece in self.pieces],
            "byte_offset": [piece.offset for piece in self.pieces],
        }
        return json.dumps(columns, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> SaveShare:
        """Read what ``to_bytes`` wrote. Raises CorruptSnapshot if it is something else."""
        try:
            columns = json.loads(data)
            specs = [TensorSpec(name, dtype, tuple(shape), size) for name, dtype, shape, size in columns["specs"]]
            pieces = tuple(
                Piece(specs[tensor], Box(tuple(offset), tuple(shape)), start)
                for tensor, offset, shape, start in zip(
                    columns["tensor"],
                    columns["box_offset"],
                    columns["box_shape"],
                    columns["byte_offset"],
                )
            )
            aliases = tuple((alias, name) for alias, name in columns["aliases"])
            return cls(columns["key"], columns["rank"], pieces, columns["nbytes"], aliases)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CorruptSnapshot(f"the table of pieces of a share cannot be read: {error!r}") from error


def plan_key(layouts: Iterable[Layout], mesh: Mesh, rank: int, aliases: Iterable[tuple[str, str]] = ()) -> str:
    """A digest of everything that a share follows from: names, dtypes, shapes, placements, ties, mesh and rank."""
    digest = hashlib.blake2b(f"{mesh.axes}{rank}".encode(), digest_size=16)
    for layout in layouts:
        spec = layout.spec
        digest.update(repr((spec.name, spec.dtype, spec.shape, spec.itemsize, layout.cuts, layout.held_at)).encode())
    digest.update(repr(list(aliases)).encode())
    return digest.hexdigest()


def plan_share(
    layouts: Sequence[Layout], mesh: Mesh, rank: int, aliases: Sequence[tuple[str, str]] = (), key: str | None = None
) -> SaveShare:
    """The share of ``rank``. All ranks of a group of holders must give the same layouts in the same order.

    ``key`` may be given where ``plan_key`` of the same arguments is already known.
    """
    groups: dict[tuple[frozenset[str], Held], list[Layout]] = {}
    for layout in layouts:
        groups.setdefault((layout.axes if layout.cuts else NO_AXES, layout.held_at), []).append(layout)
    pieces: list[Piece] = []
    offset = 0
    for (axes, held_at), members in groups.items():
        copies, place = _place_among_holders(mesh, rank, axes, held_at)
        for spec, box in _cut(members, mesh, rank, copies, place):
            piece = Piece(spec, box, offset)
            pieces.append(piece)
            offset += -(-piece.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return SaveShare(key or plan_key(layouts, mesh, rank, aliases), rank, tuple(pieces), offset, tuple(aliases))


def _place_among_holders(mesh: Mesh, rank: int, cut: frozenset[str], held_at: Held) -> tuple[int, int]:
    """How many ranks hold the boxes that ``rank`` holds, and which of them it is. A rank that holds none is the
    first of the others, and its part is empty."""
    coordinate, copies, place, held = mesh.coordinate(rank), 1, 0, dict(held_at)
    for axis, size in mesh.axes:
        at = coordinate[axis]
        if axis in held and axis not in cut:
            among = places(held[axis])
            copies, place = copies * len(among), place * len(among) + (among.index(at) if at in among else 0)
        elif axis not in cut:
            copies, place = copies * size, place * size + at
    return copies, place


def _cut(layouts: list[Layout], mesh: Mesh, rank: int, copies: int, place: int) -> list[tuple[TensorSpec, Box]]:
    """Part ``place`` of ``copies`` of the boxes of ``rank``, laid end to end."""
    held: list[tuple[TensorSpec, Box | None]] = []
    for layout in layouts:
        if not layout.cuts and not layout.held_at:
            held.append((layout.spec, None))  # the whole tensor; its box is made only where it is written
        elif (box := layout.box_of(mesh, rank)) is not None:
            held.append((layout.spec, box))
    sizes = np.fromiter(
        (math.prod(box.shape if box else spec.shape) * spec.itemsize for spec, box in held), np.int64, len(held)
    )
    ends = np.cumsum(sizes)
    first, first_row = _border(held, sizes, ends, copies, place)
    last, last_row = _border(held, sizes, ends, copies, place + 1)
    part: list[tuple[TensorSpec, Box]] = []
    for index in range(first, min(last + 1, len(held))):
        spec, whole = held[index]
        box = whole or spec.box
        rows = _rows(box.shape)
        start = first_row if index == first else 0
        stop = last_row if index == last else rows
        if start < stop and sizes[index]:
            part.append((spec, _row_range(box, start, stop)))
    if place == 0:  # nothing to balance: the first holder records that the tensor exists
        part += [(spec, box or spec.box) for (spec, box), size in zip(held, sizes) if not size]
    return part


def _border(
    held: Sequence[tuple[TensorSpec, Box | None]],
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]],
    ends: np.ndarray[tuple[int], np.dtype[np.int64]],
    copies: int,
    place: int,
) -> tuple[int, int]:
    """Tensor and row where part ``place`` begins: the border between rows that is nearest to an even cut."""
    total = int(ends[-1]) if len(ends) else 0
    aim = total * place // copies
    index = int(np.searchsorted(ends, aim, side="right"))
    if place == 0 or index == len(held):
        return (0, 0) if place == 0 else (len(held), 0)
    spec, box = held[index]
    rows = _rows(box.shape if box else spec.shape)
    size = int(sizes[index])
    inside = aim - (int(ends[index]) - size)
    return index, (2 * inside * rows + size) // (2 * size)


def _rows(shape: tuple[int, ...]) -> int:
    """Rows along the first dimension that has more than one."""
    return next((n for n in shape if n > 1), 1)


def _row_range(box: Box, start: int, stop: int) -> Box:
    """Rows ``start`` to ``stop`` of ``box`` along the first dimension that has more than one."""
    dim = next((dim for dim, n in enumerate(box.shape) if n > 1), None)
    if dim is None:
        return box
    offset, shape = list(box.offset), list(box.shape)
    offset[dim], shape[dim] = offset[dim] + start, stop - start
    return Box(tuple(offset), tuple(shape))
