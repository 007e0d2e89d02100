"""State that differs from rank to rank, and what becomes of it on another mesh. Never one rank's for all in silence.

A value is kept by the logical coordinate of the rank that saved it. On another mesh it is found again as long as the
axes that it depends on have kept their sizes: what differs along ``tp`` alone survives any change of ``dp``. Where it
is not, its rule decides: refuse (the default), derive (the object stays as the program built it), or a function that
merges the states of all old ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from elastic.errors import ConfigError
from elastic.mesh import Mesh


@dataclass(frozen=True, slots=True)
class RankPlace:
    """For whom states are merged: this rank of the mesh of today, and the mesh whose ranks saved them."""

    rank: int
    mesh: Mesh
    saved_mesh: Mesh

    @property
    def coordinate(self) -> dict[str, int]:
        return self.mesh.coordinate(self.rank)


Merge = Callable[[Sequence[Any], RankPlace], Any]
"""From the ``state_dict`` of every rank that saved, in rank order, to the one that this rank loads."""

OnResize = Literal["refuse", "derive"] | Merge


@dataclass(frozen=True, slots=True)
class PerRank:
    """See ``per_rank``."""

    value: Any
    on_resize: OnResize


def per_rank(value: Any, *, on_resize: OnResize = "refuse") -> PerRank:
    """Attach ``value`` as state that each rank has for itself: ``run.attach(buffer=elastic.per_rank(buffer))``.

    All of it is kept beside the rank's other objects, tensors too (up to 16 MiB each), so that nothing is taken for
    replicated. ``on_resize`` says what becomes of it on a mesh where a rank's own cannot be told: ``"refuse"`` ends the
    restore with a sentence, ``"derive"`` leaves the object as the program built it, and a function
    ``merge(states, place)`` is given the ``state_dict`` of every old rank and returns the one to load.
    """
    if on_resize not in ("refuse", "derive") and not callable(on_resize):
        raise ConfigError("on_resize", on_resize, "use 'refuse', 'derive' or a function merge(states, place)")
    return PerRank(value, on_resize)


def depends_on(mesh: Mesh, values: Sequence[Hashable]) -> tuple[str, ...]:
    """The axes along which ``values``, one for each rank of ``mesh``, differ."""
    found = []
    for axis, size in mesh.axes:
        for rank in range(mesh.world_size) if size > 1 else ():
            first = mesh.rank({**mesh.coordinate(rank), axis: 0})
            if values[rank] != values[first]:
                found.append(axis)
                break
    return tuple(found)


def same_place(saved: Mesh, mesh: Mesh, rank: int, axes: Sequence[str]) -> int | None:
    """The rank of ``saved`` whose value, which depends on ``axes`` alone, is that of ``rank`` on ``mesh``; None if one
    of those axes has another size here."""
    if any(saved.size(axis) != mesh.size(axis) for axis in axes):
        return None
    here = mesh.coordinate(rank)
    return saved.rank({axis: here.get(axis, 0) for axis in axes})
