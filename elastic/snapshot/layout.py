"""Where a logical tensor lies: boxes, and the boxes of every rank of a mesh. Pure.

A layout says how one logical tensor is laid over a mesh, one placement per mesh axis, in the order in which the axes
cut it. From the mesh and the placements alone each rank knows the box of every other rank, so plans are made without
talking.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic.errors import CorruptSnapshot
from elastic.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a logical tensor: offset and shape on each dimension. A 0-d tensor has the empty box."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Elements in the box; 1 for the box of a 0-d tensor."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where the two share no element."""
        offset = tuple(map(max, self.offset, other.offset))
        end = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape))
        shape = tuple(stop - start for start, stop in zip(offset, end))
        return None if any(n <= 0 for n in shape) else Box(offset, shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that cut this box out of an array that holds ``outer``."""
        return tuple(slice(a - b, a - b + n) for a, n, b in zip(self.offset, self.shape, outer.offset))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.shape)) + "]"


class TensorSpec(NamedTuple):  # no dataclass: tables of them are read, made and compared, three times as fast
    """A logical tensor by its global name, dtype (torch's name without ``torch.``) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def box(self) -> Box:
        """The box of the whole tensor."""
        return Box((0,) * len(self.shape), self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """One logical tensor over a mesh. An axis that is named nowhere replicates.

    ``cuts`` names, in the order in which they cut, the axes that shard the tensor and the dimension each cuts, into
    parts as ``torch.chunk`` makes them; several axes flattened into one are a tuple of names. ``held_at`` names axes
    with the coordinates that hold the tensor at all: one (the layers of a pipeline stage, the experts of a rank), or
    several (an embedding that the first and the last stage share).
    """

    spec: TensorSpec
    cuts: tuple[tuple[str | tuple[str, ...], int], ...] = ()
    held_at: tuple[tuple[str, int | tuple[int, ...]], ...] = ()

    @property
    def axes(self) -> frozenset[str]:
        """The axes that cut the tensor."""
        return frozenset(axis for names, _ in self.cuts for axis in ((names,) if isinstance(names, str) else names))

    def box_of(self, mesh: Mesh, rank: int) -> Box | None:
        """The box that ``rank`` holds, or None where its part is empty."""
        if not self.cuts and not self.held_at:
            return self.spec.box
        coordinate = mesh.coordinate(rank)
        if any(coordinate.get(axis, 0) not in places(at) for axis, at in self.held_at):
            return None
        offset, shape = [0] * len(self.spec.shape), list(self.spec.shape)
        for axes, dim in self.cuts:
            place, parts = mesh.place(axes, coordinate)
            rows = -(-shape[dim] // parts)
            start = min(rows * place, shape[dim])
            offset[dim] += start
            shape[dim] = min(rows, shape[dim] - start)
        return None if 0 in shape and 0 not in self.spec.shape else Box(tuple(offset), tuple(shape))


def places(at: int | tuple[int, ...]) -> tuple[int, ...]:
    """The coordinates of one entry of ``held_at``."""
    return (at,) if isinstance(at, int) else at


def holders(layout: Layout, mesh: Mesh) -> dict[Box, tuple[int, ...]]:
    """Each distinct box of the tensor with the ranks that hold it, in rank order."""
    found: dict[Box, list[int]] = {}
    for rank in range(mesh.world_size):
        if (box := layout.box_of(mesh, rank)) is not None:
            found.setdefault(box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in found.items()}


def check_tiling(spec: TensorSpec, boxes: Iterable[Box]) -> None:
    """Raise CorruptSnapshot unless ``boxes`` tile the tensor: no gap, no overlap. Names tensor and ranges."""
    whole, parts = spec.box, [box for box in boxes if box.volume]
    for box in parts:
        if len(box.shape) != len(whole.shape) or (whole.volume and box.intersect(whole) != box):
            raise CorruptSnapshot(f"tensor {spec.name!r}: box {box} lies outside of shape {spec.shape}")
    parts.sort(key=lambda box: box.offset)
    if overlap := _first_overlap(parts):
        raise CorruptSnapshot(f"tensor {spec.name!r}: boxes {overlap[0]} and {overlap[1]} overlap")
    held = sum(box.volume for box in parts)
    if held != whole.volume:
        raise CorruptSnapshot(
            f"tensor {spec.name!r}: {whole.volume - held} of {whole.volume} elements are in no box; "
            f"there are {', '.join(map(str, parts[:4])) or 'none'}{' …' if len(parts) > 4 else ''}"
        )


def _first_overlap(parts: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element. ``parts`` is sorted by offset, so a sweep over dimension 0 sees few at once."""
    active: list[Box] = []
    for box in parts:
        if box.shape:
            active = [other for other in active if other.offset[0] + other.shape[0] > box.offset[0]]
        for other in active:
            if not box.shape or other.intersect(box):
                return other, box
        active.append(box)
    return None
