"""What a program says of the tensors of a module that their objects cannot say: which axes cut them, which coordinates
hold them, and what they are called wherever they are held.

A DTensor brings its placements. A plain tensor says nothing, so one that is a part of something larger (Megatron-style
tensor parallelism, pipeline stages, experts) is declared, on the module that owns it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from elastic.errors import CaptureError, ConfigError
from elastic.mesh import AXES, Mesh
from elastic.snapshot.names import WRAPPERS, listing

if TYPE_CHECKING:
    from torch import nn

    Module = TypeVar("Module", bound=nn.Module)

Axes = str | tuple[str, ...]
Names = Mapping[str, str] | Callable[[str], str]

_ATTRIBUTE = "_elastic_declaration"


@dataclass(frozen=True, slots=True)
class Declared:
    """What is declared of one tensor: its name below the attached module, its cuts, who holds it (see ``Layout``)."""

    name: str
    cuts: tuple[tuple[Axes, int], ...] = ()
    held_at: tuple[tuple[str, int | tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class _Declaration:
    cuts: Mapping[str, tuple[tuple[Axes, int], ...]]
    held_at: tuple[tuple[str, int | tuple[int, ...]], ...]
    rename: Callable[[str], str] | None


def declare(
    module: Module,
    *,
    cuts: Mapping[str, Mapping[Axes, int]] | None = None,
    held_at: Mapping[str, int | tuple[int, ...]] | None = None,
    names: Names | None = None,
) -> Module:
    """Say how the tensors of ``module`` (parameters and buffers) lie over ``run.mesh``; returns ``module``.

    Call it before ``run.attach``, on any module inside of what is attached; declarations on a module and on those
    around it add up. Optimizer state follows its parameter.

    ``cuts`` gives, by the tensor's name in this module (``"weight"``, ``"qkv.weight"``), the axes that cut it and the
    dimension each cuts, in equal parts in the order of their coordinates: ``{"weight": {"tp": 0}}``. Several axes cut
    one after the other; a tuple of axes cuts as one. For plain tensors that hold a part; DTensors bring their
    placements. A part must be one contiguous range: keep fused weights whose parts are cut one by one (q, k and v of
    each rank in one tensor) apart, or they come back in another order on another mesh.

    ``held_at`` says which coordinates hold the module's tensors at all: ``{"pp": 1}`` for a pipeline stage,
    ``{"ep": 0}`` for an expert, ``{"pp": (0, 3)}`` for an embedding that two stages share under one name. Axes that are
    not named hold replicas.

    ``names`` gives the global name of what has a local one: a mapping of names or of their beginnings
    (``{"0": "8", "1": "9"}`` on the layers of a stage), or a function of the name in this module. Global names (layer
    8, expert 3) make another stage or expert layout a matter of data.

    Raises ConfigError for an unknown axis, a coordinate or dimension that is none. ``run.attach`` raises CaptureError
    for a declared name that the module does not have.
    """
    found = _Declaration(
        {name: _checked_cuts(name, given) for name, given in _mapping_of_cuts(cuts or {}).items()},
        _checked_holders(held_at or {}),
        _renaming(names),
    )
    module.__dict__[_ATTRIBUTE] = found
    return module


@dataclass(slots=True)
class Declarations:
    """All declarations in a module tree, by the raw names of the modules that they were made on."""

    found: dict[str, _Declaration] = field(default_factory=dict)
    _unused: set[tuple[str, str]] = field(default_factory=set)

    @staticmethod
    def of(module: nn.Module) -> Declarations:
        """The declarations on ``module`` and on everything below it."""
        named = module.named_modules(remove_duplicate=False)
        found = {name: part.__dict__[_ATTRIBUTE] for name, part in named if _ATTRIBUTE in part.__dict__}
        unused = {(name, tensor) for name, declaration in found.items() for tensor in declaration.cuts}
        return Declarations(found, unused)

    def of_tensor(self, raw: str) -> Declared:
        """What is declared of the tensor whose ``state_dict`` name is ``raw``; the innermost declaration of an axis
        or of cuts counts."""
        parts = raw.split(".")
        tail = ""
        cuts: tuple[tuple[Axes, int], ...] = ()
        held: dict[str, int | tuple[int, ...]] = {}
        for depth in range(len(parts) - 1, -1, -1):
            if parts[depth] not in WRAPPERS:
                tail = f"{parts[depth]}.{tail}" if tail else parts[depth]
            prefix = ".".join(parts[:depth])
            declaration = self.found.get(prefix)
            if declaration is not None:
                if tail in declaration.cuts:
                    cuts = cuts or declaration.cuts[tail]
                    self._unused.discard((prefix, tail))
                held = {**dict(declaration.held_at), **held}
                if declaration.rename is not None:
                    tail = declaration.rename(tail)
        return Declared(tail, cuts, tuple(sorted(held.items())))

    def some_hold(self, mesh: Mesh) -> bool:
        """Whether ranks of ``mesh`` hold other tensors than this one."""
        return any(mesh.size(axis) > 1 for declaration in self.found.values() for axis, _ in declaration.held_at)

    def check_used(self, where: str) -> None:
        """Raise CaptureError if cuts were declared of something that no module holds."""
        if self._unused:
            names = listing(".".join(part for part in pair if part) for pair in self._unused)
            raise CaptureError(f"cuts are declared of {names}, and no tensor has that name", where, "correct the name")


def _mapping_of_cuts(cuts: object) -> Mapping[str, Mapping[Axes, int]]:
    if not isinstance(cuts, Mapping):
        raise ConfigError("cuts", cuts, "name tensors of the module and what cuts them, as {'weight': {'tp': 0}}")
    return cuts


def _checked_cuts(name: str, given: Mapping[Axes, int]) -> tuple[tuple[Axes, int], ...]:
    if not isinstance(given, Mapping):
        raise ConfigError("cuts", {name: given}, "name the axes that cut it and their dimensions, as {'tp': 0}")
    for axes, dim in given.items():
        for axis in (axes,) if isinstance(axes, str) else axes:
            if axis not in AXES:
                raise ConfigError("cuts", {name: dict(given)}, f"unknown axis {axis!r}; use {', '.join(AXES)}")
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise ConfigError("cuts", {name: dict(given)}, f"axis {axes!r} needs the number of a dimension")
    return tuple(given.items())


def _checked_holders(
    held_at: Mapping[str, int | tuple[int, ...]],
) -> tuple[tuple[str, int | tuple[int, ...]], ...]:
    if not isinstance(held_at, Mapping):
        raise ConfigError("held_at", held_at, "name axes and their coordinates, as {'pp': 1}")
    found = []
    for axis, at in held_at.items():
        if axis not in AXES:
            raise ConfigError("held_at", dict(held_at), f"unknown axis {axis!r}; use {', '.join(AXES)}")
        several = at if isinstance(at, tuple) else (at,)
        if not several or any(isinstance(place, bool) or not isinstance(place, int) or place < 0 for place in several):
            raise ConfigError("held_at", dict(held_at), f"axis {axis!r} needs a coordinate, or a tuple of them")
        once = tuple(sorted(set(several)))
        found.append((axis, once[0] if len(once) == 1 else once))
    return tuple(found)


def _renaming(names: Names | None) -> Callable[[str], str] | None:
    if names is None or callable(names):
        return names
    if not isinstance(names, Mapping):
        raise ConfigError("names", names, "give a mapping of names, as {'0': '8'}, or a function of the name")
    given = dict(names)

    def rename(name: str) -> str:
        head = name
        while head not in given:
            head, dot, _ = head.rpartition(".")
            if not dot:
                return name
        return given[head] + name[len(head) :]

    return rename
