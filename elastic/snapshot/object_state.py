"""Any object with ``state_dict`` and ``load_state_dict``: schedulers, scalers, loaders, averages, your own.

Its state is walked at every snapshot. Tensors of more than ``INLINE_BYTES`` are lifted out and saved like those of a
model, as the same on all replicas; smaller ones (generator states, counters) stay in the tree, which each rank saves
for itself, so that values that differ between ranks stay apart. Of those that are lifted a sample stays in the tree, so
that it is noticed when replicas are not alike. What is attached with ``per_rank`` stays in the tree whatever its size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from elastic.errors import CaptureError
from elastic.mesh import Mesh
from elastic.snapshot.component import LOADER, OBJECT, SCALER, SCHEDULER, AddTensor, Differences, Saved, Target
from elastic.snapshot.layout import Box, Layout
from elastic.snapshot.names import check_distinct, child
from elastic.snapshot.per_rank import OnResize
from elastic.snapshot.tensor_layout import describe, flat_bytes, is_dtensor, is_expanded, with_layout_of
from elastic.snapshot.tree import MAX_ARRAY_BYTES, TensorRef, TensorValue

INLINE_BYTES = 8 << 10
"""Largest tensor of a plain object that stays in its tree; the CPU generator's state is 5 KiB."""
SAMPLED_ELEMENTS = 1024
"""About so many elements of a tensor are looked at to tell whether replicas are alike."""


class ObjectState:
    """The component of anything with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, name: str, value: Any, mesh: Mesh, rank: int) -> None:
        self.name, self.value, self.kind = name, value, kind_of(name, value)
        self._mesh, self._rank = mesh, rank
        self.layouts: list[Layout] = []
        self.tensors: list[torch.Tensor] = []
        self._found: dict[str, torch.Tensor] = {}
        self._tree: object = None
        self._loaded: tuple[object, dict[str, torch.Tensor]] | None = None
        self.per_rank = False
        """Each rank has its own: nothing of it counts as replicated."""
        self.on_resize: OnResize = getattr(value, "elastic_on_resize", "refuse")

    def refresh(self) -> bool:
        found: list[tuple[str, torch.Tensor]] = []
        limit = None if self.per_rank else INLINE_BYTES
        add = _too_large if self.per_rank else lambda name, tensor: found.append((name, tensor))
        self._tree = lift(self.value.state_dict(), self.name, add, inline_bytes=limit)
        self._found = dict(found)
        described = [describe(name, tensor, self._mesh, self._rank) for name, tensor in found]
        layouts, tensors = [layout for layout, _ in described], [local for _, local in described]
        if layouts == self.layouts and len(tensors) == len(self.tensors):
            if all(map(_same_memory, tensors, self.tensors)):
                return False
        else:
            check_distinct((layout.spec.name for layout in layouts), self.name)
        self.layouts, self.tensors = layouts, tensors
        return True

    def tree(self) -> object:
        if self.per_rank:
            place = {"topology": str(self._mesh), "coordinate": self._mesh.coordinate(self._rank)}
            return {"kind": self.kind, "state": self._tree, "per_rank": place}
        return {"kind": self.kind, "state": self._tree}

    def samples(self) -> dict[str, str]:
        """A digest of some elements of each tensor that counts as replicated; equal on replicas that are alike."""
        plain = ((name, tensor) for name, tensor in self._found.items() if not is_dtensor(tensor))
        return {name: _sample(tensor) for name, tensor in plain}

    def plan(self, saved: Saved, differences: Differences) -> list[Target]:
        self.refresh()
        live = dict(zip((layout.spec.name for layout in self.layouts), zip(self.layouts, self.tensors)))
        fresh: dict[str, torch.Tensor] = {}
        targets: list[Target] = []
        for name, spec in saved.tensors.items():
            layout, local = live.get(name, (None, None))
            if layout is None or local is None or layout.spec.shape != spec.shape:
                box: Box | None = spec.box
                memory = fresh[name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            else:
                box = layout.box_of(self._mesh, self._rank)
                if layout.spec.dtype == spec.dtype and self.kind != LOADER:
                    memory = local  # load_state_dict is given what state_dict gave, filled anew: no second copy
                else:
                    memory = torch.empty(local.shape, dtype=getattr(torch, spec.dtype), device=local.device)
                fresh[name] = with_layout_of(memory, self._found[name])
            if box is not None:
                targets.append(Target(spec, box, memory, live=memory is local))
        tree = saved.tree if isinstance(saved.tree, dict) else {}
        if (look := getattr(self.value, "differences_from", None)) is not None:
            differences.others += [f"{self.name} {text}" for text in look(tree.get("state"))]
        for alias, name in saved.aliases.items():
            if name in fresh:
                fresh[alias] = fresh[name]
        self._loaded = (tree.get("state"), fresh)
        return targets

    def finish(self) -> None:
        if self._loaded is not None:
            tree, tensors = self._loaded
            state = restored(tree, tensors)
            if hasattr(self.value, "differences_from"):
                state = {**state, "fingerprint": ""}  # compared before, as a version of the data
            self.value.load_state_dict(state)
            self._loaded = None


def kind_of(name: str, value: object) -> str:
    """What ``value`` is to a restore mode, by its class or else by the name it is attached under."""
    from torch.optim.lr_scheduler import LRScheduler

    bases = {base.__name__ for base in type(value).__mro__}
    if isinstance(value, LRScheduler) or name == SCHEDULER:
        return SCHEDULER
    if bases & {"GradScaler", "ShardedGradScaler"} or name == SCALER:
        return SCALER
    if name == LOADER or any(base.endswith(("Loader", "Sampler")) for base in bases):
        return LOADER
    return OBJECT


def lift(value: object, name: str, add: AddTensor, inline_bytes: int | None = INLINE_BYTES) -> object:
    """``value`` with its tensors replaced: those above ``inline_bytes`` (None: above 16 MiB) go to ``add`` under a name
    made of the keys, smaller ones stay inline."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        assert isinstance(value, dict)
        return kind((key, lift(item, child(name, key), add, inline_bytes)) for key, item in value.items())
    if kind is list or kind is tuple:
        assert isinstance(value, (list, tuple))
        return kind(lift(item, f"{name}.{index}", add, inline_bytes) for index, item in enumerate(value))
    if not isinstance(value, torch.Tensor):
        return value
    most = MAX_ARRAY_BYTES if inline_bytes is None else inline_bytes
    dense = value.layout == torch.strided and value.device.type != "meta" and not value.is_quantized
    if dense and value.nbytes <= most and not is_dtensor(value):
        data = flat_bytes(value.detach().cpu().resolve_conj().resolve_neg().contiguous())
        return TensorValue(str(value.dtype).removeprefix("torch."), tuple(value.shape), data.numpy().tobytes())
    add(name, value)
    expanded = dense and not is_dtensor(value) and is_expanded(value)
    return TensorRef(name, tuple(value.shape) if expanded else None)


def restored(value: object, tensors: Mapping[str, torch.Tensor]) -> Any:
    """``value`` with the tensors put back that ``lift`` took out."""
    if isinstance(value, TensorRef):
        tensor = tensors[value.name]
        return tensor if value.expanded is None else tensor.expand(value.expanded)
    if isinstance(value, TensorValue):
        tensor = torch.empty(value.shape, dtype=getattr(torch, value.dtype))
        if value.data:
            flat_bytes(tensor).copy_(torch.from_numpy(np.frombuffer(value.data, np.uint8).copy()))
        return tensor
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        assert isinstance(value, dict)
        return kind((key, restored(item, tensors)) for key, item in value.items())
    if kind is list or kind is tuple:
        assert isinstance(value, (list, tuple))
        return kind(restored(item, tensors) for item in value)
    return value


def _too_large(name: str, tensor: torch.Tensor) -> None:
    raise CaptureError(
        f"a tensor of {tensor.nbytes} bytes cannot be state of each rank for itself (at most {MAX_ARRAY_BYTES}, dense)",
        name,
        "declare its box with elastic.declare, or keep it out of the state",
    )


def _sample(tensor: torch.Tensor) -> str:
    each = max(2, round(SAMPLED_ELEMENTS ** (1 / max(tensor.dim(), 1))))
    for dim, size in enumerate(tensor.shape):
        if size > each:
            tensor = tensor.index_select(dim, torch.linspace(0, size - 1, each, device=tensor.device).long())
    data = flat_bytes(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
    return xxhash.xxh64_hexdigest(data.numpy())


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.device == b.device)
