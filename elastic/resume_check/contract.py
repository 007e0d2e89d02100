"""What a user declares of a training that is resumed: by how much it may differ on another mesh. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from elastic.errors import ConfigError
from elastic.mesh import DATA_AXES, Mesh


@dataclass(frozen=True, slots=True)
class ErrorContract:
    """Relative differences that another mesh may bring, since it adds numbers up in another order. State that is
    restored, sample ids, cursors, schedulers and scalers must be equal in any case.

    Give it to the train function (``train.error_contract = elastic.ErrorContract(loss=1e-6)``), or to the command.
    """

    loss: float = 1e-5
    outputs: float = 1e-4
    """Of the attached modules' outputs (logits) for the first batch: the norm of the difference over the norm."""
    gradient_norm: float = 1e-4
    update: float = 1e-3
    """Of what the next step adds to the weights, likewise. Adam divides by what may be near zero: it is the loosest."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, (int, float)) and 0.0 <= value < math.inf):
                raise ConfigError(field.name, value, "use a finite relative difference of at least 0")

    def changed(self, given: Mapping[str, float]) -> ErrorContract:
        """With other tolerances. Raises ConfigError for one that there is not."""
        known = [field.name for field in fields(self)]
        for name in given:
            if name not in known:
                raise ConfigError("--tolerance", name, f"use {', '.join(known)}")
        return replace(self, **given)


def another_mesh(mesh: Mesh) -> Mesh:
    """A mesh of the same axes, which are those that the train function knows, with another number of data-parallel
    ranks: the largest proper divisor, so that shares stay even; 2 of 1. Without a data axis another axis shrinks."""
    sizes = dict(mesh.axes)
    axes = [name for name in sizes if name in DATA_AXES] or list(sizes)
    if not axes:
        return Mesh((("dp", 2),))
    axis = next((name for name in axes if sizes[name] > 1), axes[0])
    size = sizes[axis]
    other = next((n for n in range(size // 2, 0, -1) if size % n == 0), 2)
    return Mesh(tuple((name, other if name == axis else held) for name, held in mesh.axes))


def relative(a: float, b: float) -> float:
    """The difference of two numbers over the larger of them; 0 for two equal ones, infinite where one is none."""
    if a == b:
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))
