"""What a live tensor is to a snapshot: its logical name, shape and dtype, its layout over the mesh, its local part.

A plain tensor counts as replicated on every axis. A DTensor brings its placements. What cannot be saved bit for bit is
refused here, by key and type.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from elastic.errors import CaptureError
from elastic.mesh import Mesh
from elastic.snapshot.layout import Layout, TensorSpec

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor; torch.distributed.tensor is not imported for the question."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank behind ``tensor``, compact: of a DTensor its shard, of a broadcast one copy."""
    local: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return _compact(local.detach())


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether a dimension of ``tensor`` repeats one element (stride 0), so that it is larger than its memory."""
    return 0 in tensor.stride() and any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape))


def describe(name: str, tensor: torch.Tensor, mesh: Mesh, rank: int) -> tuple[Layout, torch.Tensor]:
    """The layout of ``tensor`` under ``name`` and its local part. Raises CaptureError for what cannot be saved."""
    _refuse_unsupported(name, tensor)
    if is_dtensor(tensor):
        return _describe_dtensor(name, tensor, mesh, rank)
    local = local_part(tensor)
    return Layout(spec_of(name, local)), local


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The logical tensor ``name`` with the shape and dtype of ``tensor``."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.dtype.itemsize)


def with_layout_of(local: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """``local`` as the part of this rank of a tensor that is laid out as ``model`` is: a DTensor if that is one."""
    if not is_dtensor(model):
        return local
    from torch.distributed.tensor import DTensor

    like: Any = model
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` seen as integers of its own size, same shape: copying those cannot change a bit (NaN, bool, fp8).

    16-byte elements gain a last dimension of 2. A lazy conjugate or negative is carried out first.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype.itemsize == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(SIGNED[tensor.dtype.itemsize])


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous ``tensor`` as one row of bytes, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    if is_expanded(tensor):
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _refuse_unsupported(name: str, tensor: torch.Tensor) -> None:
    kind, cure = "", "keep it out of the state_dict, or convert it to a dense tensor"
    if tensor.is_quantized:
        kind = f"a quantized tensor ({tensor.dtype})"
    elif tensor.layout != torch.strided:
        kind = f"a sparse tensor ({tensor.layout})" if tensor.layout != torch.jagged else "a jagged nested tensor"
    elif tensor.is_nested:
        kind = "a nested tensor"
    elif tensor.device.type == "meta":
        kind, cure = "a tensor on the meta device, which has no values", "materialise the module first (to_empty)"
    elif isinstance(tensor, UninitializedTensorMixin):
        kind, cure = f"an {type(tensor).__name__}, whose shape is not known yet", "run one forward pass before attach"
    elif hasattr(type(tensor), "__tensor_flatten__") and not is_dtensor(tensor):
        kind = f"a tensor subclass {type(tensor).__module__}.{type(tensor).__qualname__}"
    if kind:
        raise CaptureError(f"cannot save {kind}", name, cure)


def _describe_dtensor(name: str, tensor: Any, mesh: Mesh, rank: int) -> tuple[Layout, torch.Tensor]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    device_mesh, placements = tensor.device_mesh, tensor.placements
    axes = device_mesh.mesh_dim_names
    if axes is None:
        raise CaptureError(
            f"a DTensor whose device mesh has no axis names ({device_mesh}) is not supported",
            name,
            f"give init_device_mesh(mesh_dim_names=...) the axes of run.mesh, which are {mesh}",
        )
    cuts = []
    for dim, (axis, placement) in enumerate(zip(axes, placements)):
        if isinstance(placement, Partial):
            raise CaptureError(
                f"a DTensor with the placement {placement!r} on axis {axis!r} holds unreduced parts",
                name,
                "redistribute it to Replicate() or Shard() first",
            )
        if mesh.size(axis) != device_mesh.size(dim):
            raise CaptureError(
                f"axis {axis!r} of the DTensor's device mesh has {device_mesh.size(dim)} ranks, that of run.mesh "
                f"({mesh}) has {mesh.size(axis)}",
                name,
                "use the axes of run.mesh",
            )
        if type(placement) is Shard:
            cuts.append((axis, placement.dim % max(tensor.dim(), 1)))
        elif type(placement) is not Replicate:
            raise CaptureError(f"a DTensor with the placement {placement} on axis {axis!r} is not supported yet", name)
    local = local_part(tensor)
    layout = Layout(
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.dtype.itemsize),
        tuple(cuts),
    )
    box = layout.box_of(mesh, rank)
    if tuple(local.shape) != (box.shape if box else tuple(local.shape)) or (box is None and local.numel()):
        raise CaptureError(
            f"a DTensor with placements {placements} has a local part of shape {tuple(local.shape)} where the mesh "
            f"{mesh} gives rank {rank} {box.shape if box else 'nothing'}; this layout is not supported yet",
            name,
        )
    return layout, local
