"""The layout of a DTensor: its placements on a device mesh, said in the axes of the run's mesh.

Device meshes may be the run's whole mesh, a part of it (``mesh["dp"]``) or hold axes flattened into one
(``mesh["dp", "cp"]._flatten()``). ``_StridedShard`` is how FSDP2 says that it cut what tensor parallelism had cut
before: the axis belongs behind the cuts to its right. What that leaves is contiguous; a strided shard without such
cuts would be interleaved, and is refused. Where torch can say the offset of this rank's part, it must be ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from elastic.errors import CaptureError
from elastic.mesh import Mesh
from elastic.snapshot.layout import Box, Layout

Axes = str | tuple[str, ...]


def cuts_of(name: str, tensor: Any, mesh: Mesh, rank: int) -> tuple[tuple[Axes, int], ...]:
    """The cuts of a DTensor, in the order in which they cut. Raises CaptureError for what has no such form."""
    device_mesh, placements = tensor.device_mesh, tensor.placements
    if device_mesh.mesh_dim_names is None:
        raise CaptureError(
            f"a DTensor whose device mesh has no axis names ({device_mesh}) is not supported",
            name,
            f"use run.device_mesh(), or give the device mesh the axes of run.mesh, which are {mesh}",
        )
    axes = _axes_of(name, device_mesh, mesh, rank)
    cuts: list[tuple[Axes, int, int]] = []
    for number in reversed(range(len(placements))):
        placement, size = placements[number], device_mesh.size(number)
        if isinstance(placement, Partial):
            raise CaptureError(
                f"a DTensor with the placement {placement!r} on axis {axes[number]!r} holds unreduced parts",
                name,
                "redistribute it to Replicate() or Shard() first",
            )
        if isinstance(placement, _StridedShard):
            cut = (axes[number], placement.dim % max(tensor.dim(), 1), size)
            cuts.insert(_behind(cuts, cut[1], int(placement.split_factor), name, placements), cut)
        elif isinstance(placement, Shard):
            cuts.insert(0, (axes[number], placement.dim % max(tensor.dim(), 1), size))
        elif not isinstance(placement, Replicate):
            raise CaptureError(f"a DTensor with the placement {placement!r} is not supported", name)
    return tuple((axis, dim) for axis, dim, size in cuts if size > 1)


def check_against_torch(layout: Layout, box: Box | None, tensor: Any, local: tuple[int, ...]) -> None:
    """Raise CaptureError unless ``box`` has the shape ``local`` of this rank's part, and the offset torch gives it.

    Torch's word on a strided shard holds for even parts; of uneven ones only the shape is compared.
    """
    whole, device_mesh, placements = tuple(tensor.shape), tensor.device_mesh, tensor.placements
    if (box is None and 0 not in local) or (box is not None and local != box.shape):
        raise CaptureError(
            f"a DTensor with placements {placements} has a local part of shape {local} where its layout "
            f"over axes {device_mesh.mesh_dim_names} gives this rank {box.shape if box else 'nothing'}",
            layout.spec.name,
            "shard dimensions that the axes divide, or let torch place the tensor (distribute_tensor, fully_shard)",
        )
    if box is None or not box.volume or _is_uneven_and_strided(tensor):
        return
    shape, offset = compute_local_shape_and_global_offset(whole, device_mesh, placements)
    if (tuple(shape), tuple(offset)) != (local, box.offset):
        raise CaptureError(
            f"torch places this rank's part of a DTensor with placements {placements} at {tuple(offset)}, "
            f"its layout says {box.offset}; this layout is not supported",
            layout.spec.name,
        )


def _is_uneven_and_strided(tensor: Any) -> bool:
    """Whether FSDP2 cut unequal parts of what was cut before: then torch's placements do not say where they lie."""
    sizes = dict.fromkeys(range(tensor.dim()), 1)
    for number, placement in enumerate(tensor.placements):
        if isinstance(placement, (Shard, _StridedShard)):
            sizes[placement.dim % tensor.dim()] *= tensor.device_mesh.size(number)
    strided = [p.dim % tensor.dim() for p in tensor.placements if isinstance(p, _StridedShard)]
    return any(tensor.shape[dim] % sizes[dim] for dim in strided)


def _behind(
    cuts: Sequence[tuple[Axes, int, int]], dim: int, factor: int, name: str, placements: Sequence[object]
) -> int:
    """The place in ``cuts`` behind those cuts of ``dim`` that make ``factor`` parts."""
    parts = 1
    for place, (_, cut, size) in enumerate(cuts):
        if parts == factor:
            return place
        parts *= size if cut == dim else 1
    if parts != factor:
        raise CaptureError(
            f"a DTensor with placements {tuple(placements)} has its rows interleaved: nothing to the right of a "
            f"_StridedShard cuts dimension {dim} in {factor}",
            name,
            "redistribute it to Shard() first",
        )
    return len(cuts)


def _axes_of(name: str, device_mesh: Any, mesh: Mesh, rank: int) -> list[Axes]:
    """For each dimension of a device mesh the axis of the run's mesh that it is, or the axes that it flattens."""
    here, at = mesh.coordinate(rank), device_mesh.get_coordinate()
    found: list[Axes] = []
    for dim, axis in enumerate(device_mesh.mesh_dim_names):
        size = device_mesh.size(dim)
        if size == 1:
            found.append(axis)
        elif axis in here:
            if mesh.size(axis) != size:
                raise CaptureError(
                    f"axis {axis!r} of the DTensor's device mesh has {size} ranks, that of run.mesh "
                    f"({mesh}) has {mesh.size(axis)}",
                    name,
                    "use run.device_mesh(), or the axes of run.mesh",
                )
            if at is not None and at[dim] != here[axis]:
                raise CaptureError(
                    f"rank {rank} is {at[dim]} on axis {axis!r} of the DTensor's device mesh and {here[axis]} on that "
                    f"of run.mesh ({mesh})",
                    name,
                    "use run.device_mesh(), or number the ranks as run.mesh does",
                )
            found.append(axis)
        else:
            found.append(_flattened(name, device_mesh, dim, mesh, rank))
    return found


def _flattened(name: str, device_mesh: Any, dim: int, mesh: Mesh, rank: int) -> tuple[str, ...]:
    """The axes of the run's mesh that dimension ``dim`` of a device mesh runs through, the last of them fastest."""
    ranks = device_mesh.mesh
    for other, place in reversed(list(enumerate(device_mesh.get_coordinate()))):
        if other != dim:
            ranks = ranks.select(other, place)
    along = [mesh.coordinate(other) for other in ranks.tolist() if other < mesh.world_size]
    axes = tuple(axis for axis, _ in mesh.axes if len({coordinate[axis] for coordinate in along}) > 1)
    here = mesh.coordinate(rank)
    same = [{**coordinate, **{axis: here[axis] for axis in axes}} == here for coordinate in along]
    in_order = [mesh.place(axes, coordinate)[0] for coordinate in along] == list(range(mesh.place(axes, {})[1]))
    if not (all(same) and in_order and len(along) == device_mesh.size(dim)):
        axis = device_mesh.mesh_dim_names[dim]
        raise CaptureError(
            f"axis {axis!r} of the DTensor's device mesh is no axis of run.mesh ({mesh}), nor some of them flattened",
            name,
            "name the axes in ScalingConfig(mesh=...), for example {'dp_replicate': 2, 'dp_shard': -1}, "
            "and use run.device_mesh()",
        )
    return axes
