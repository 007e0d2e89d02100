"""Keeps the device meshes of different generations apart, so that no cache of torch takes one for another.

To torch two DeviceMeshes are equal that have the same ranks, names and thread. What it caches of operators on DTensors
holds the mesh that was seen first, and hands it out for every equal one later on. A training process goes through
several process groups in one thread: the tensors that it made would then lie on a mesh of an earlier generation, with
the place that this rank had there and with groups that are gone.

The caches are many, some of each thread, some out of reach. So it is the meshes that are made unequal, by the one part
of their identity that means nothing else: the number of the thread, which torch sets for its own tests only.
"""

from __future__ import annotations

import logging
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("elastic.mesh_identity")

_PART = "_thread_id"


class _Numbered:
    """The attribute, with the generation in which it was set."""

    generation = 0

    def __set__(self, mesh: DeviceMesh, value: Any) -> None:
        mesh.__dict__[_PART] = (value, self.generation)

    def __get__(self, mesh: DeviceMesh | None, owner: type[DeviceMesh]) -> Any:
        return self if mesh is None else mesh.__dict__[_PART]


def set_mesh_generation(generation: int) -> None:
    """From now on this process makes device meshes that are unequal to those of every other generation.

    Uses internals of torch 2.13; where they are missing, a warning says so.
    """
    if _PART not in DeviceMesh.__init__.__code__.co_names:
        log.warning("torch's device meshes are not known here: DTensors may keep a mesh of an earlier generation")
        return
    part = DeviceMesh.__dict__.get(_PART)
    if not isinstance(part, _Numbered):
        part = _Numbered()
        setattr(DeviceMesh, _PART, part)
    part.generation = generation
