"""What a live tensor is to a snapshot: its logical name, shape and dtype, its layout over the mesh, its local part.

A plain tensor counts as replicated on every axis unless something else is declared of it. A DTensor brings its
placements. What cannot be saved bit for bit is refused here, by key and type.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from elastic.errors import CaptureError
from elastic.mesh import Mesh
from elastic.snapshot.declared import Declared
from elastic.snapshot.layout import Layout, TensorSpec, places

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


def describe(
    name: str, tensor: torch.Tensor, mesh: Mesh, rank: int, declared: Declared | None = None
) -> tuple[Layout, torch.Tensor]:
    """The layout of ``tensor`` under ``name`` and its local part. Raises CaptureError for what cannot be saved."""
    _refuse_unsupported(name, tensor)
    if declared is not None:
        _check_holder(name, declared, mesh, rank)
    if is_dtensor(tensor):
        return _describe_dtensor(name, tensor, mesh, rank, declared)
    local = local_part(tensor)
    layout = Layout(spec_of(name, local))
    if declared is None or not (declared.cuts or declared.held_at):
        return layout, local
    if declared.cuts and local.shape != tensor.shape:
        raise CaptureError("cuts are declared of a tensor that repeats one element (expand)", name, "clone it first")
    return _as_declared(layout, declared, mesh), local


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


def _describe_dtensor(
    name: str, tensor: Any, mesh: Mesh, rank: int, declared: Declared | None
) -> tuple[Layout, torch.Tensor]:
    from elastic.snapshot.dtensor_layout import check_against_torch, cuts_of

    spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.dtype.itemsize)
    layout, local = Layout(spec, cuts_of(name, tensor, mesh, rank)), local_part(tensor)
    check_against_torch(layout, layout.box_of(mesh, rank), tensor, tuple(local.shape))
    return layout if declared is None else _as_declared(layout, declared, mesh), local


def _as_declared(layout: Layout, declared: Declared, mesh: Mesh) -> Layout:
    """``layout`` of what is, as declared, one part of a larger tensor: the declared cuts come before its own."""
    spec, shape = layout.spec, list(layout.spec.shape)
    for axes, dim in declared.cuts:
        if not -len(shape) <= dim < len(shape):
            raise CaptureError(
                f"a cut of dimension {dim} is declared of a tensor of shape {spec.shape}",
                spec.name,
                f"name one of its dimensions, 0 to {len(shape) - 1}" if shape else "it has no dimension to cut",
            )
        shape[dim] *= mesh.place(axes, {})[1]
    cuts = tuple((axes, dim % len(shape)) for axes, dim in declared.cuts if mesh.place(axes, {})[1] > 1)
    held_at = tuple((axis, at) for axis, at in declared.held_at if mesh.size(axis) > 1)
    whole = Layout(spec._replace(shape=tuple(shape)), (*cuts, *layout.cuts), held_at)
    used = [axis for axis, _ in held_at]
    used += [axis for axes, _ in whole.cuts for axis in ((axes,) if isinstance(axes, str) else axes)]
    if len(set(used)) < len(used):
        twice = ", ".join(sorted({axis for axis in used if used.count(axis) > 1}))
        raise CaptureError(
            f"axis {twice} of {mesh} says twice where the tensor lies: {_told(whole)}",
            spec.name,
            "an axis either cuts a tensor or says who holds it, once",
        )
    return whole


def _told(layout: Layout) -> str:
    """What a layout says, in words."""
    cuts = [f"{axes if isinstance(axes, str) else ' and '.join(axes)} cuts dimension {d}" for axes, d in layout.cuts]
    return ", ".join([*cuts, *(f"held at {at} of {axis}" for axis, at in layout.held_at)])


def _check_holder(name: str, declared: Declared, mesh: Mesh, rank: int) -> None:
    here = mesh.coordinate(rank)
    for axis, at in declared.held_at:
        beyond = [place for place in places(at) if place >= mesh.size(axis)]
        if beyond or here.get(axis, 0) not in places(at):
            raise CaptureError(
                f"it is declared as held at {at} of axis {axis!r}, and rank {rank}, which is {here.get(axis, 0)} of "
                f"{mesh.size(axis)} there, holds it",
                name,
                f"declare held_at={{{axis!r}: run.coordinate[{axis!r}]}} on what this rank builds",
            )
