"""A mesh: named axes and sizes. A rank has one coordinate on each axis; the last axis varies fastest.

Pure. The template a user gives may hold one ``-1``, which takes what the world size leaves. A rule is one template or
several, in order of preference: of the meshes that the ranks at hand can form the largest is taken, and of equally
large ones the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "dp", "ep", "cp", "tp")
"""Axis names, outermost first: neighbours on the last axis are neighbours in rank, hence likely on one host.
``dp_replicate`` and ``dp_shard`` are the two axes of hybrid sharding (HSDP); ``dp`` is data parallelism in one axis."""

DATA_AXES = ("dp_replicate", "dp_shard", "dp", "ep")
"""Axes whose ranks take different samples; along the others ranks share a batch."""

MODEL_AXES = ("pp", "ep", "cp", "tp")
"""Axes along which ranks may hold different parts of a model."""

MeshTemplate = Mapping[str, int]
"""Axis to size, outermost first; -1 once at most."""

MeshRule = MeshTemplate | Sequence[MeshTemplate]
"""Which meshes a run may have."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes with their sizes, outermost first. ``Mesh((("dp", 4), ("tp", 2)))`` holds 8 ranks."""

    axes: tuple[tuple[str, int], ...]

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Size of ``axis``; 1 for an axis the mesh does not name."""
        return dict(self.axes).get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate of ``rank`` on every axis, row-major."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside a mesh of {self.world_size}")
        found = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name, _ in self.axes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at ``coordinate``; an axis that is left out counts as 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def place(self, axes: str | tuple[str, ...], coordinate: Mapping[str, int]) -> tuple[int, int]:
        """Where ``coordinate`` lies on an axis, or on several flattened into one (the last varies fastest), and the
        size of that."""
        place, whole = 0, 1
        for axis in (axes,) if isinstance(axes, str) else axes:
            size = self.size(axis)
            place, whole = place * size + coordinate.get(axis, 0), whole * size
        return place, whole

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """All ranks that differ from ``rank`` on ``axes`` alone, in order."""
        here = self.coordinate(rank)
        return tuple(
            other
            for other in range(self.world_size)
            if all(self.coordinate(other)[name] == here[name] for name in here if name not in axes)
        )

    def __str__(self) -> str:
        return "·".join(f"{name}{size}" for name, size in self.axes) or "1"


def templates(rule: MeshRule) -> tuple[MeshTemplate, ...]:
    """The templates of ``rule``, the preferred one first."""
    return (rule,) if isinstance(rule, Mapping) else tuple(rule)


def resolve(rule: MeshRule, world_size: int) -> Mesh | None:
    """The mesh that ``rule`` makes of exactly ``world_size`` ranks, or None where it makes none."""
    return next((mesh for t in templates(rule) if (mesh := _resolve(t, world_size))), None)


def _resolve(template: MeshTemplate, world_size: int) -> Mesh | None:
    fixed = math.prod(size for size in template.values() if size != -1)
    has_free = -1 in template.values()
    if world_size < 1 or world_size % fixed or (not has_free and world_size != fixed):
        return None
    return Mesh(tuple((name, world_size // fixed if size == -1 else size) for name, size in template.items()))


def largest(rule: MeshRule, at_least: int, at_most: int) -> Mesh | None:
    """The largest mesh of ``rule`` with ``at_least`` to ``at_most`` ranks, or None."""
    return next((mesh for n in range(at_most, at_least - 1, -1) if (mesh := resolve(rule, n))), None)


def smallest(rule: MeshRule, at_least: int, at_most: int) -> Mesh | None:
    """The smallest mesh of ``rule`` with ``at_least`` to ``at_most`` ranks, or None."""
    return next((mesh for n in range(at_least, at_most + 1) if (mesh := resolve(rule, n))), None)


def check_rule(value: object) -> MeshRule:
    """What a user gave as ``mesh``: a template, a list of them, or a mapping from world sizes to them.

    Raises ConfigError: no template at all, an unknown axis, a size that is neither positive nor -1, two free axes, a
    mesh that does not have the world size that it is given for.
    """
    if isinstance(value, Mapping) and value and all(type(key) is int for key in value):
        return tuple(_of_size(size, value[size]) for size in sorted(value, reverse=True))
    if isinstance(value, Mapping):
        return check_template(value)
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError("mesh", value, "use a mapping of axes to sizes, as {'dp': -1, 'tp': 2}, or a list of those")
    return tuple(check_template(template) for template in value)


def _of_size(world_size: int, template: object) -> MeshTemplate:
    mesh = _resolve(check_template(template), world_size)
    if mesh is None:
        raise ConfigError("mesh", {world_size: template}, f"is no mesh of {world_size} ranks; make its sizes fit")
    return dict(mesh.axes)


def check_template(template: object) -> dict[str, int]:
    """The template, or ConfigError: unknown axis, a size that is neither positive nor -1, two free axes."""
    if not isinstance(template, Mapping) or not template:
        raise ConfigError("mesh", template, "use a mapping of axes to sizes, as {'dp': -1, 'tp': 2}")
    for name, size in template.items():
        if name not in AXES:
            raise ConfigError("mesh", dict(template), f"unknown axis {name!r}; use {', '.join(AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ConfigError("mesh", dict(template), f"axis {name!r} needs a positive size, or -1 for what is left")
    if list(template.values()).count(-1) > 1:
        raise ConfigError("mesh", dict(template), "only one axis can be -1")
    return dict(template)
