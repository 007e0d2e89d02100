"""What a rank attached, and its state at a boundary: tensors with layouts, everything else as one canonical tree.

The first capture walks everything; later ones only ask whether the tensors are still the same memory, so that a
snapshot's stall stays one memory copy. Tied tensors (same memory, shape and strides) are recorded once, under the first
of their names, and the other names as aliases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from elastic.errors import CaptureError, RestoreError
from elastic.mesh import Mesh
from elastic.protocol.shares import ALIGNMENT_BYTES, Agreement
from elastic.snapshot.agreement import agreements
from elastic.snapshot.component import MODEL, OPTIMIZER, Component
from elastic.snapshot.declared import Declared
from elastic.snapshot.layout import Box, Layout
from elastic.snapshot.module_state import ModuleState
from elastic.snapshot.object_state import ObjectState
from elastic.snapshot.optimizer_state import OptimizerState
from elastic.snapshot.per_rank import PerRank
from elastic.snapshot.replica_samples import ReplicaSamples
from elastic.snapshot.save_plan import SaveShare, plan_key, plan_share
from elastic.snapshot.tensor_layout import local_part
from elastic.snapshot.tree import encode

SLACK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class CapturedTensor:
    """One tensor to save: its layout over the mesh, the memory of this rank, and other names for the same memory.

    ``held`` is the box that the memory holds; None stands for the whole tensor.
    """

    layout: Layout
    tensor: torch.Tensor
    aliases: tuple[str, ...] = ()
    held: Box | None = None


@dataclass(frozen=True, slots=True)
class Captured:
    """The attached state of one rank at one boundary. ``tensors`` are the live ones: stage them before the next step.

    ``plan_key`` names the share that follows from the layouts; ``objects`` is canonical JSON of all that is no tensor.
    """

    tensors: tuple[CapturedTensor, ...]
    plan_key: str
    objects: bytes

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        return tuple((alias, t.layout.spec.name) for t in self.tensors for alias in t.aliases)


class Attached:
    """The state that the user named with ``run.attach``, on one rank of a mesh.

    ``named`` maps names to modules, optimizers, schedulers, scalers, loaders and anything else with ``state_dict`` and
    ``load_state_dict``. Raises CaptureError, naming the key, for what cannot be saved.
    """

    def __init__(self, named: Mapping[str, object], mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self.broken: str | None = None
        """Why the live state cannot be trusted (a restore failed midway), until a later restore succeeds."""
        self._modules: list[ModuleState] = []
        self.components: tuple[Component, ...] = tuple(self._component(name, value) for name, value in named.items())
        self._tensors: tuple[CapturedTensor, ...] | None = None
        self._layouts: list[Layout] = []
        self._key = ""
        self._share: SaveShare | None = None
        self._names: dict[int, Declared] | None = None
        self.agreements: tuple[Agreement, ...] = ()
        """What the share follows from, for other ranks to compare."""
        self._refresh()

    def capture(self, extra: Mapping[str, object] | None = None) -> Captured:
        """The state now. ``extra`` is kept beside the objects: plain values for ``restore`` to hand back."""
        self.check_usable()
        self._refresh()
        assert self._tensors is not None
        tree = {
            "components": {c.name: c.tree() for c in self.components},
            "extra": dict(extra or {}),
            **self._replicas.tree(),
        }
        samples = {c.name: found for c in self.components if isinstance(c, ObjectState) and (found := c.samples())}
        if samples:
            tree["samples"] = samples
        return Captured(self._tensors, self._key, encode(tree, "attached"))

    def share(self) -> SaveShare:
        """What this rank writes of the state as last captured: worked out once per layout."""
        if self._share is None or self._share.key != self._key:
            tensors = self._tensors or ()
            aliases = tuple((alias, t.layout.spec.name) for t in tensors for alias in t.aliases)
            self._share = plan_share([t.layout for t in tensors], self.mesh, self.rank, aliases, self._key)
        return self._share

    def share_bytes(self) -> int:
        """Bytes an arena slot needs for this rank's share, optimizer state that does not exist yet included.

        For optimizers without state yet, two tensors like each parameter and a counter are taken for granted (Adam);
        one that keeps more needs its slot grown after the first step.
        """
        self._refresh()
        tensors = self._tensors or ()
        empty = [c.optimizer for c in self.components if isinstance(c, OptimizerState) and not c.optimizer.state]
        parameters = [local_part(p) for optimizer in empty for group in optimizer.param_groups for p in group["params"]]
        copies = 1 if any(layout.cuts or layout.held_at for layout in self._layouts) else self.mesh.world_size
        future = 2 * sum(p.nbytes for p in parameters) // copies + 3 * len(parameters) * ALIGNMENT_BYTES
        largest_row = max((t.tensor.nbytes // max(1, *t.tensor.shape) for t in tensors if t.tensor.dim()), default=0)
        return self.share().nbytes + future + 4 * largest_row + SLACK_BYTES

    def optimizer_steps(self) -> tuple[tuple[str, int], ...]:
        """Steps taken by each optimizer that counts them, for the proof that all ranks saved one moment."""
        found = [(c.name, c.steps()) for c in self.components if isinstance(c, OptimizerState)]
        return tuple((name, steps) for name, steps in found if steps is not None)

    def scheduler_steps(self) -> tuple[tuple[str, int], ...]:
        """``last_epoch`` of each LR scheduler, likewise."""
        found = [(c.name, getattr(c.value, "last_epoch", None)) for c in self.components if isinstance(c, ObjectState)]
        return tuple((name, last) for name, last in found if type(last) is int)

    @property
    def partial(self) -> bool:
        """Whether other ranks hold tensors that this rank does not: stages of a pipeline, experts."""
        return any(module.partial for module in self._modules)

    def check_usable(self) -> None:
        """Raise RestoreError if a restore failed midway and the live state is half old, half new."""
        if self.broken is not None:
            raise RestoreError(f"the live state is not whole: {self.broken}", cure="restore again before going on")

    def invalidate(self) -> None:
        """Look at everything anew at the next capture."""
        self._tensors = None

    def _component(self, name: str, value: object) -> Component:
        if not name.isidentifier():
            raise CaptureError(f"{name!r} is not a name that state can be attached under", name, "use an identifier")
        if isinstance(value, PerRank):
            inner = self._component(name, value.value)
            if not isinstance(inner, ObjectState) or hasattr(value.value, "differences_from"):
                raise CaptureError(
                    f"{type(value.value).__qualname__} knows its own layout and cannot be attached with per_rank",
                    name,
                    "attach it as it is; elastic.declare tells the boxes of plain tensors",
                )
            inner.per_rank, inner.on_resize = True, value.on_resize
            return inner
        if isinstance(value, nn.Module):
            module = ModuleState(name, value, self.mesh, self.rank)
            self._modules.append(module)
            return module
        if isinstance(value, Optimizer) and type(value).state_dict is Optimizer.state_dict:
            return OptimizerState(name, value, self.mesh, self.rank, self._parameter_names, lambda: self.partial)
        if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
            raise CaptureError(
                f"cannot attach an object of type {type(value).__module__}.{type(value).__qualname__}: it has no "
                "state_dict() and load_state_dict()",
                name,
                "give it both, or leave it out",
            )
        found = ObjectState(name, value, self.mesh, self.rank)
        if isinstance(value, Optimizer):
            found.kind = OPTIMIZER
        return found

    def _parameter_names(self) -> Mapping[int, Declared]:
        if self._names is None:
            self._names = {}
            taken: set[str] = set()
            for module in self._modules:
                own = list(module.parameters())
                for declared, parameter in own:
                    # the module attached first owns the bare names; a later one that has the same adds its own
                    if declared.name in taken:
                        declared = replace(declared, name=f"{module.name}.{declared.name}")
                    self._names.setdefault(id(parameter), declared)
                taken.update(declared.name for declared, _ in own)
        return self._names

    def _refresh(self) -> None:
        changed = self._tensors is None
        for module in self._modules:
            if module.refresh():
                changed, self._names = True, None
        if self._names is None:
            for component in self.components:
                if isinstance(component, OptimizerState):
                    component.invalidate()
        for component in self.components:
            if component.kind != MODEL and component.refresh():
                changed = True
        if changed:
            self._gather()

    def _gather(self) -> None:
        """Merge the tensors of all components, ties recorded once."""
        places: dict[object, int] = {}
        layouts: list[Layout] = []
        tensors: list[torch.Tensor] = []
        aliases: dict[int, list[str]] = {}
        for layout, tensor in self._held():
            place = places.setdefault(_memory(tensor) or len(layouts), len(layouts))
            if place < len(layouts):
                aliases.setdefault(place, []).append(layout.spec.name)
            else:
                layouts.append(layout)
                tensors.append(tensor)
        known = self._tensors or ()
        same_plan = layouts == self._layouts and aliases == {
            i: list(t.aliases) for i, t in enumerate(known) if t.aliases
        }
        self._layouts = layouts
        self._tensors = tuple(
            CapturedTensor(
                layout,
                tensor,
                tuple(aliases.get(place, ())),
                layout.box_of(self.mesh, self.rank) if layout.cuts else None,
            )
            for place, (layout, tensor) in enumerate(zip(layouts, tensors))
        )
        if not same_plan or not self._key:
            pairs = [(alias, layouts[place].spec.name) for place, names in aliases.items() for alias in names]
            self._key = plan_key(layouts, self.mesh, self.rank, pairs)
            self.agreements = agreements(layouts, self.mesh)
        self._replicas = ReplicaSamples(layouts, tensors, [found.held for found in self._tensors], self.mesh)

    def _held(self) -> Iterator[tuple[Layout, torch.Tensor]]:
        for component in self.components:
            yield from zip(component.layouts, component.tensors)


def _memory(tensor: torch.Tensor) -> object:
    """What two names of one tied tensor have in common, or None for a tensor without memory."""
    if not tensor.numel():
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
