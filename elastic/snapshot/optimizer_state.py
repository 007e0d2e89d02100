"""An optimizer's state by the names of its parameters, never by their positions.

State tensors are called ``<attached as>.state.<parameter>.<key>``; the parameter is named as in the attached module
that holds it, or ``group<g>.<i>`` if none does. The tree holds the parameter groups: their options, the names of their
parameters, and which parameters have which state, so that "no state yet" and "state of zeros" stay apart. State is put
back with the dtype it had, never cast to the dtype of its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from elastic.errors import CaptureError, CorruptSnapshot
from elastic.mesh import MODEL_AXES, Mesh
from elastic.snapshot.component import OPTIMIZER, Differences, Saved, Target
from elastic.snapshot.declared import Declared
from elastic.snapshot.layout import Layout
from elastic.snapshot.names import check_distinct
from elastic.snapshot.object_state import lift, restored
from elastic.snapshot.tensor_layout import describe, is_dtensor, local_part, spec_of, with_layout_of
from elastic.snapshot.tensor_slots import TensorSlots
from elastic.snapshot.tree import Encoded, encode_text
from elastic.snapshot.versions import VersionDifference

_NOT_OPTIONS = ("params", "param_names")


class OptimizerState:
    """The component of a ``torch.optim.Optimizer``.

    ``names`` gives, by their ids, what parameters are called and what is declared of them; ``partial`` says whether
    other ranks hold parameters that this one does not.
    """

    kind = OPTIMIZER

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        mesh: Mesh,
        rank: int,
        names: Callable[[], Mapping[int, Declared]],
        partial: Callable[[], bool],
    ) -> None:
        self.name, self.optimizer = name, optimizer
        self._mesh, self._rank, self._names_by_id, self._partial = mesh, rank, names, partial
        self._declared: Mapping[int, Declared] = {}
        self.layouts: list[Layout] = []
        self.tensors: list[torch.Tensor] = []
        self._slots: TensorSlots | None = None
        self._values: list[tuple[str, str, dict[str, object]]] = []
        self._params: list[list[str]] = []
        self._static: tuple[list[Encoded], Encoded] = ([], Encoded("[]"))
        self._pending: Callable[[], None] | None = None
        self._taken = self._counted()
        optimizer.register_step_post_hook(self._count)

    def invalidate(self) -> None:
        """The names of the parameters may be others now."""
        self._slots = None

    def refresh(self) -> bool:
        if self._slots is not None and self._slots.unchanged():
            return False
        by_parameter = self._named_parameters()
        slots = TensorSlots()
        slots.expect_size(self.optimizer.state)
        slots.expect_size(self.optimizer.param_groups)
        for group in self.optimizer.param_groups:
            slots.expect_items(group["params"])
        found: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        keys: dict[tuple[str, ...], list[str]] = {}
        self._values = []
        for parameter, state in self.optimizer.state.items():
            name = by_parameter.get(id(parameter))
            if name is None:
                raise CaptureError(
                    "the optimizer holds state of something that is in none of its parameter groups", self.name
                )
            slots.add(self.optimizer.state, parameter, state)
            slots.expect_size(state)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found.append((f"{self.name}.state.{name}.{key}", value, parameter))
                    slots.add(state, key, value, value)
                else:
                    self._values.append((name, key, state))
                    lift(value, f"{self.name}.state.{name}.{key}", lambda n, t, p=parameter: found.append((n, t, p)))
            tensor_keys = tuple(key for key, value in state.items() if isinstance(value, torch.Tensor))
            keys.setdefault(tensor_keys, []).append(name)
        check_distinct((name for name, _, _ in found), self.name)
        described = [self._describe(*one) for one in found]
        self.layouts, self.tensors = [layout for layout, _ in described], [local for _, local in described]
        self._static = (
            [Encoded(encode_text(names)) for names in self._params],
            Encoded(encode_text([[list(key), names] for key, names in keys.items()])),
        )
        plain = all(isinstance(state[key], (int, float, str, type(None))) for _, key, state in self._values)
        slots.close()
        self._slots = slots if plain else None
        return True

    def tree(self) -> object:
        params, state = self._static
        groups = [
            {
                "params": names,
                "options": {
                    key: lift(value, f"{self.name}.param_groups.{key}", _refuse)
                    for key, value in group.items()
                    if key not in _NOT_OPTIONS
                },
            }
            for group, names in zip(self.optimizer.param_groups, params)
        ]
        values = [
            [name, key, lift(state[key], f"{self.name}.state.{name}.{key}", lambda n, t: None)]
            for name, key, state in self._values
        ]
        return {"kind": self.kind, "class": type(self.optimizer).__name__, "taken": self._taken, "groups": groups,
                "state": state, "values": values}  # fmt: skip

    def parameter_names(self) -> dict[int, str]:
        """The names of all parameters, by id."""
        return self._named_parameters()

    def steps(self) -> int:
        """How many steps the optimizer has taken over the run's whole life. Counted here, since a parameter that had no
        gradient (an expert that nothing was sent to) took part in fewer."""
        return self._taken

    def _count(self, *_: object) -> None:
        self._taken += 1

    def _counted(self) -> int:
        return max((int(state["step"]) for state in self.optimizer.state.values() if "step" in state), default=0)

    def plan(self, saved: Saved, differences: Differences) -> list[Target]:
        self._pending = None
        by_parameter = self._named_parameters()
        parameters = {by_parameter[id(p)]: p for group in self.optimizer.param_groups for p in group["params"]}
        tree: dict[str, Any] = saved.tree if isinstance(saved.tree, dict) else {}
        groups = tree.get("groups", [])
        options = {name: group["options"] for group in groups for name in group["params"]}
        label = f"{self.name}.state."
        differences.missing += [label + name for name in parameters if name not in options]
        if not self._partial():
            differences.unexpected += [label + name for name in options if name not in parameters]
        here, there = type(self.optimizer).__name__, tree.get("class")
        if here != there:  # state of another algorithm means nothing to this one
            differences.versions.append(VersionDifference(f"optimizer kind of {self.name}", str(there), here))
            return []
        held = [sorted(name for name in group["params"] if name in parameters) for group in groups]
        if [names for names in held if names] != [sorted(names) for names in self._params if names]:
            differences.others.append(f"{self.name} has other parameter groups than in the snapshot")

        state: dict[str, dict[str, object]] = {}
        targets: list[Target] = []
        for keys, names in tree.get("state", []):
            for name in names:
                if (parameter := parameters.get(name)) is not None:
                    fresh = state.setdefault(name, {})
                    for key in keys:
                        fresh[key] = self._fresh(saved, f"{label}{name}.{key}", key, parameter, options[name], targets)
        for name, key, value in tree.get("values", []):
            if name in parameters:
                lifted: dict[str, torch.Tensor] = {}
                for full in saved.tensors:
                    if full.startswith(f"{label}{name}.{key}"):
                        made = self._fresh(saved, full, key, parameters[name], options[name], targets)
                        lifted[full] = made
                state.setdefault(name, {})[key] = restored(value, lifted)
        taken = tree.get("taken")
        self._pending = lambda: self._install(parameters, state, groups, options, taken)
        return targets

    def finish(self) -> None:
        if self._pending is not None:
            self._pending()
            self._pending = None
            self._slots = None

    def _describe(self, name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> tuple[Layout, torch.Tensor]:
        """The layout of a state tensor: that of its parameter where it is plain and has the shape of its local part."""
        declared = self._declared.get(id(parameter))
        if is_dtensor(tensor) or declared is None:
            return describe(name, tensor, self._mesh, self._rank, declared and replace(declared, cuts=()))
        if tensor.shape != local_part(parameter).shape:
            declared = replace(declared, cuts=())
        elif is_dtensor(parameter):
            like, _ = describe(name, parameter, self._mesh, self._rank, declared)
            local = local_part(tensor)
            return replace(like, spec=spec_of(name, local)._replace(shape=like.spec.shape)), local
        return describe(name, tensor, self._mesh, self._rank, declared)

    def _named_parameters(self) -> dict[int, str]:
        """Names of all parameters by id; fills ``_params``."""
        known = self._declared = self._names_by_id()
        self._params = []
        found: dict[int, str] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            names = [
                known[id(p)].name if id(p) in known else f"group{number}.{index}"
                for index, p in enumerate(group["params"])
            ]
            unknown = sum(id(p) not in known for p in group["params"])
            if unknown and any(self._mesh.size(axis) > 1 for axis in MODEL_AXES):
                raise CaptureError(
                    f"{unknown} parameters of group {number} are in no attached module: nothing tells them from those "
                    "of other ranks",
                    self.name,
                    "attach the module that holds them (an nn.ParameterDict for copies of your own)",
                )
            self._params.append(names)
            found.update(zip(map(id, group["params"]), names))
        return found

    def _fresh(
        self,
        saved: Saved,
        full_name: str,
        key: str,
        parameter: torch.Tensor,
        options: Mapping[str, Any],
        targets: list[Target],
    ) -> torch.Tensor:
        """Memory for one saved state tensor, laid out as its parameter if it has that shape, and its target."""
        spec = saved.find(full_name)
        if spec is None:
            raise CorruptSnapshot(f"the snapshot says that it holds {full_name!r}, and has no such tensor")
        device = parameter.device
        if key == "step":  # where torch.optim.Optimizer.load_state_dict puts it
            device = device if options.get("capturable") or options.get("fused") else torch.device("cpu")
        dtype = getattr(torch, spec.dtype)
        layout, local = describe(full_name, parameter, self._mesh, self._rank, self._declared.get(id(parameter)))
        if spec.shape != layout.spec.shape:
            fresh = torch.empty(spec.shape, dtype=dtype, device=device)
            targets.append(Target(spec, None, fresh, live=False))
            return fresh
        if dtype.itemsize and not is_dtensor(parameter) and not parameter.is_contiguous():
            fresh = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
        else:
            fresh = torch.empty(local.shape, dtype=dtype, device=device)
        if (box := layout.box_of(self._mesh, self._rank)) is not None:
            targets.append(Target(spec, box, fresh, live=False))
        return with_layout_of(fresh, parameter)

    def _install(
        self,
        parameters: Mapping[str, torch.Tensor],
        state: Mapping[str, dict[str, object]],
        groups: list[dict[str, Any]],
        options_by_name: Mapping[str, Any],
        taken: int | None,
    ) -> None:
        self.optimizer.state.clear()
        for name, held in state.items():
            self.optimizer.state[parameters[name]] = held
        for number, group in enumerate(self.optimizer.param_groups):
            options: Mapping[str, Any] = next(
                (options_by_name[name] for name in self._params[number] if name in options_by_name), {}
            )
            if not self._params[number] and number < len(groups) and not groups[number]["params"]:
                options = groups[number]["options"]
            for key, value in restored(options, {}).items():
                live = group.get(key)
                if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape:
                    live.detach().copy_(value)  # a captured graph reads the learning rate from this very memory
                else:
                    group[key] = value
        self._taken = self._counted() if taken is None else taken


def _refuse(name: str, tensor: torch.Tensor) -> None:
    raise CaptureError(f"a tensor of {tensor.nbytes} bytes cannot be an option of a parameter group", name)
