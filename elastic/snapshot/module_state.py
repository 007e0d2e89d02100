"""A module's parameters and buffers, under canonical names, exactly those of its ``state_dict``.

A plain module is walked without calling ``state_dict``, and only once; one with hooks, extra state or a ``state_dict``
of its own is asked each time. A restore copies in place, so ties, views held by FSDP and the optimizer's references
stay what they are; what ``state_dict`` made up on the way goes back through ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from elastic.errors import CaptureError
from elastic.mesh import Mesh
from elastic.snapshot.component import MODEL, Differences, Memory, Saved, Target, memory_of
from elastic.snapshot.declared import Declarations, Declared
from elastic.snapshot.layout import Layout
from elastic.snapshot.names import canonical, check_distinct
from elastic.snapshot.object_state import lift, restored
from elastic.snapshot.tensor_layout import describe
from elastic.snapshot.tensor_slots import TensorSlots


class ModuleState:
    """The component of an ``nn.Module``."""

    kind = MODEL

    def __init__(self, name: str, module: nn.Module, mesh: Mesh, rank: int) -> None:
        self.name, self.module = name, module
        self._mesh, self._rank = mesh, rank
        self.layouts: list[Layout] = []
        self.tensors: list[torch.Tensor] = []
        self._memory: list[Memory] = []
        self._extra: dict[str, object] = {}
        self._slots: TensorSlots | None = None
        self._raw: dict[str, str] = {}
        self.partial = False
        """Whether other ranks hold tensors of this module that this rank does not."""
        self._to_load: list[tuple[str, Target]] = []
        self._saved_extra: dict[str, object] = {}

    @property
    def has_extra(self) -> bool:
        """Whether the module keeps state of its own making (``get_extra_state``) beside its tensors."""
        return bool(self._extra)

    def refresh(self) -> bool:
        if self._slots is not None and self._slots.unchanged():
            return False
        slots = _plain_slots(self.module)
        named = dict(self.module.state_dict(keep_vars=True) if slots is None else _plain_entries(self.module))
        declarations = Declarations.of(self.module)
        described: list[tuple[Layout, torch.Tensor]] = []
        self._extra, self._raw = {}, {}
        values: dict[str, object] = {}
        for raw, value in named.items():
            declared = declarations.of_tensor(raw) if declarations.found else None
            name = declared.name if declared is not None else canonical(raw)
            if declared is not None and values.get(name) is value:
                continue  # one tensor, declared to be one under both of its names
            if name in values:
                check_distinct([name, name], self.name)
            values[name] = value
            self._raw[f"{self.name}.{name}"] = raw
            if isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
                described.append(describe(f"{self.name}.{name}", value, self._mesh, self._rank, declared))
            else:
                self._extra[name] = value
        declarations.check_used(self.name)
        stages = self._mesh.size("pp") * self._mesh.size("ep") > 1
        self.partial = declarations.some_hold(self._mesh) or (stages and not described)
        self.layouts, self.tensors = [layout for layout, _ in described], [local for _, local in described]
        self._memory = list(map(memory_of, self.tensors))
        if slots is not None:
            slots.close()
        self._slots = slots
        return True

    def parameters(self) -> Iterator[tuple[Declared, nn.Parameter]]:
        """Every parameter with its name and what is declared of it; a tied one under each of its names."""
        declarations = Declarations.of(self.module)
        for raw, parameter in self.module.named_parameters(remove_duplicate=False):
            yield declarations.of_tensor(raw) if declarations.found else Declared(canonical(raw)), parameter

    def tree(self) -> object:
        if not self._extra:
            return {"kind": self.kind}
        return {"kind": self.kind, "extra": {k: lift(v, f"{self.name}.{k}", _refuse) for k, v in self._extra.items()}}

    def plan(self, saved: Saved, differences: Differences) -> list[Target]:
        self.refresh()
        self._to_load = []
        targets: list[Target] = []
        made_up = set[int]() if self._slots is not None else self._made_up()
        for place, (layout, local, memory) in enumerate(zip(self.layouts, self.tensors, self._memory)):
            here = layout.spec
            name = here.name
            spec = saved.tensors.get(name) or saved.find(name)
            if spec is None:
                differences.missing.append(name)
            elif spec.shape != here.shape:
                differences.shapes.append(f"{name} is {spec.shape} in the snapshot and {here.shape} here")
            else:
                if spec.dtype != here.dtype:
                    differences.cast.append(f"{name} ({spec.dtype} → {here.dtype})")
                box = None
                if (layout.cuts or layout.held_at) and (box := layout.box_of(self._mesh, self._rank)) is None:
                    continue
                if place in made_up:
                    target = Target(spec, box, torch.empty_like(local), live=False)
                    self._to_load.append((self._raw[name], target))
                else:
                    target = Target(spec, box, local, known=memory)
                targets.append(target)
        if not self.partial:  # what this rank does not hold, another does; their names are checked when they save
            live = {layout.spec.name for layout in self.layouts}
            differences.unexpected += [name for name in (*saved.tensors, *saved.aliases) if name not in live]
        tree = saved.tree if isinstance(saved.tree, dict) else {}
        self._saved_extra = {k: restored(v, {}) for k, v in tree.get("extra", {}).items()}
        differences.missing += [f"{self.name}.{name}" for name in self._extra if name not in self._saved_extra]
        if not self.partial:
            differences.unexpected += [f"{self.name}.{name}" for name in self._saved_extra if name not in self._extra]
        return targets

    def _made_up(self) -> set[int]:
        """Places of tensors that are no parameter or buffer: a ``state_dict`` of its own made them for the occasion."""
        own = (getattr(t, "_local_tensor", t) for t in (*self.module.parameters(), *self.module.buffers()))
        memory = {tensor.untyped_storage().data_ptr() for tensor in own}
        places = enumerate(self.tensors)
        return {place for place, t in places if t.numel() and t.untyped_storage().data_ptr() not in memory}

    def finish(self) -> None:
        again = {raw: target.tensor for raw, target in self._to_load}
        extra = {
            self._raw[f"{self.name}.{name}"]: value for name, value in self._saved_extra.items() if name in self._extra
        }
        if again or extra:
            self.module.load_state_dict({**again, **extra}, strict=False)
        self._to_load, self._saved_extra = [], {}


def _refuse(name: str, tensor: torch.Tensor) -> None:
    raise CaptureError(f"a tensor of {tensor.nbytes} bytes cannot be extra state", name, "hold it as a buffer")


def _plain_slots(module: nn.Module) -> TensorSlots | None:
    """The slots of all parameters and buffers, or None if some module has its own idea of ``state_dict``."""
    slots = TensorSlots()
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        part = stack.pop()
        if part in seen:
            continue
        seen.add(part)
        kind = type(part)
        if (
            "state_dict" in part.__dict__
            or kind.state_dict is not nn.Module.state_dict
            or kind._save_to_state_dict is not nn.Module._save_to_state_dict
            or kind.get_extra_state is not nn.Module.get_extra_state
            or part._state_dict_hooks
            or part._state_dict_pre_hooks
        ):
            return None
        for container in (part._parameters, part._buffers, part._modules, part._non_persistent_buffers_set):
            slots.expect_size(container)
        for hooks in (part._state_dict_hooks, part._state_dict_pre_hooks):
            slots.expect_size(hooks)
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in holders:
            for key, tensor in holder.items():
                if key not in part._non_persistent_buffers_set:
                    slots.add(holder, key, tensor, tensor)
        for key, below in part._modules.items():
            slots.add(part._modules, key, below)
            if below is not None:
                stack.append(below)
    return slots


def _plain_entries(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """What ``state_dict(keep_vars=True)`` of a plain module holds, in its order."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + key, parameter
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield prefix + key, buffer
    for key, below in module._modules.items():
        if below is not None:
            yield from _plain_entries(below, f"{prefix}{key}.")
