"""The survivors' own tensors as a snapshot: taken after a failure, of the boundary before it.

A failure nearly always strikes inside a step, before the optimizer has run. Then parameters and optimizer state still
are those of the last boundary. That is checked, not assumed: by hooks on the optimizers, by the write counts of every
parameter and optimizer tensor, and by comparing what else the step could have moved. What forward may change without
a count (buffers: batch norm writes its running statistics uncounted) is kept aside at each boundary and put back.

What cannot be proven disqualifies the live tier, in words; nothing is guessed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from elastic.errors import SnapshotError
from elastic.mesh import Mesh
from elastic.protocol.shares import ALIGNMENT_BYTES, PointInTime, SlotRef, StagedShare
from elastic.snapshot.capture import Attached, Captured
from elastic.snapshot.component import OBJECT, SCALER, SCHEDULER, Component
from elastic.snapshot.module_state import ModuleState
from elastic.snapshot.object_state import ObjectState
from elastic.snapshot.optimizer_state import OptimizerState
from elastic.snapshot.save_plan import plan_key, plan_share
from elastic.snapshot.staging import Stager
from elastic.snapshot.tree import encode

MOST_COUNTED = 2000
"""Write counts read at each boundary; of more tensors than that an even sample, and the optimizers' hooks decide."""


OWN = "run"
"""The run's own counters: they move at the boundary alone."""


class BoundaryGuard:
    """Knows, of what is attached, whether it still is what it was at the last boundary. One per generation."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        modules = [c for c in attached.components if isinstance(c, ModuleState)]
        self._modules = [component.module for component in modules]
        self._optimizers = [c.optimizer for c in attached.components if isinstance(c, OptimizerState)]
        self._schedulers = [c for c in attached.components if isinstance(c, ObjectState) and c.kind == SCHEDULER]
        self._scalers = [c for c in attached.components if isinstance(c, ObjectState) and c.kind == SCALER]
        self._objects: list[Component] = [
            c for c in attached.components if isinstance(c, ObjectState) and c.kind == OBJECT and c.name != OWN
        ]
        self._objects += [component for component in modules if component.has_extra]
        self._buffers = [buffer for module in self._modules for buffer in module.buffers()]
        self._kept = [buffer.detach().clone() for buffer in self._buffers]
        self._counted: list[torch.Tensor] = []
        self._counts: list[int] = []
        self._places: list[int] = []
        self._state_sizes: list[int] = []
        self._others: list[Any] = []
        self._stepping = ""
        self._hooks = [self._hook(optimizer) for optimizer in self._optimizers]
        self.marked = False

    def _hook(self, optimizer: Optimizer) -> Any:
        def begun(*_: Any) -> None:
            self._stepping = type(optimizer).__name__

        return optimizer.register_step_pre_hook(begun)

    @property
    def doubtful(self) -> bool:
        """Whether no optimizer has stepped since the boundary, where there is one: the step may have failed in code
        that swallows exceptions."""
        return not self._stepping and bool(self._optimizers)

    def mark(self) -> None:
        """This is a boundary. Called at each one, so it reads counters and copies buffers and does nothing else."""
        sizes = [len(optimizer.state) for optimizer in self._optimizers]
        if sizes != self._state_sizes:
            self._count_anew(sizes)
        self._counts = [tensor._version for tensor in self._counted]
        if self._kept:
            torch._foreach_copy_(self._kept, [buffer.detach() for buffer in self._buffers])
        self._others = self._look()
        self._stepping = ""
        self.marked = True

    def _count_anew(self, sizes: list[int]) -> None:
        held = {buffer.data_ptr() for buffer in self._buffers}
        found = [p for module in self._modules for p in module.parameters()]
        for optimizer in self._optimizers:
            found.extend(v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
        stride = -(-len(found) // MOST_COUNTED) or 1
        self._counted = [tensor for tensor in found if tensor.data_ptr() not in held][::stride]
        self._places = [tensor.data_ptr() for tensor in self._counted]
        self._state_sizes = sizes

    def _look(self) -> list[Any]:
        """What is neither counted nor kept and must not move within a step before the optimizer does."""
        seen: list[Any] = [scheduler.value.last_epoch for scheduler in self._schedulers]  # type: ignore[attr-defined]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        seen += [[value for name, value in group.items() if name != "params"] for group in groups]
        for scaler in self._scalers:
            scale = getattr(scaler.value, "_scale", None)
            seen.append(scale._version if isinstance(scale, torch.Tensor) else scale)
        for component in self._objects:
            component.refresh()
            seen.append(encode(component.tree(), component.name))
        return seen

    def why_not(self) -> str:
        """Why the state cannot be proven to be that of the last boundary; empty where it is proven."""
        if not self.marked:
            return "no boundary was reached"
        if self._stepping:
            return f"{self._stepping} had begun its step"
        if [len(optimizer.state) for optimizer in self._optimizers] != self._state_sizes:
            return "an optimizer made new state"
        moved = sum(tensor._version != count for tensor, count in zip(self._counted, self._counts, strict=True))
        if moved:
            return f"{moved} parameters or optimizer tensors were written to since the boundary"
        if [tensor.data_ptr() for tensor in self._counted] != self._places:
            return "a parameter or optimizer tensor was given other memory"
        if [id(buffer) for module in self._modules for buffer in module.buffers()] != list(map(id, self._buffers)):
            return "a buffer was replaced"
        if self._look() != self._others:
            return "a scheduler, scaler, learning rate or other object moved since the boundary"
        return ""

    def rewind(self) -> None:
        """Put the buffers back to what they were at the boundary."""
        if self._kept:
            with torch.no_grad():
                torch._foreach_copy_([buffer.detach() for buffer in self._buffers], self._kept)

    def close(self) -> None:
        """Take the hooks off the user's optimizers."""
        for hook in self._hooks:
            hook.remove()


class Salvage:
    """What a survivor keeps of the boundary it stood at: tensors and objects, without modules or process groups."""

    def __init__(self, captured: Captured, point: PointInTime, ledger: tuple[str, ...]) -> None:
        self.captured, self.point, self.ledger = captured, point, ledger
        tensors = [found.tensor for found in captured.tensors]
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        row = max((tensor.nbytes // max(1, tensor.shape[0]) for tensor in tensors if tensor.dim()), default=0)
        self.slack_bytes = 2 * row + (len(tensors) + 1) * ALIGNMENT_BYTES
        """By how much one share of so many equal ones may exceed an even part."""

    @staticmethod
    def of(
        attached: Attached, guard: BoundaryGuard, point: PointInTime, ledger: tuple[str, ...]
    ) -> tuple[Salvage | None, str]:
        """The salvage, or why there is none."""
        if reason := guard.why_not():
            return None, reason
        own = [c.name for c in attached.components if isinstance(c, ObjectState) and c.per_rank]
        if own:
            return None, f"{', '.join(own)} is state of each rank for itself, and that of the lost rank is gone"
        guard.rewind()
        try:
            captured = attached.capture()
        except SnapshotError as error:
            return None, str(error)
        if any(found.layout.cuts or found.layout.held_at for found in captured.tensors):
            return None, "the state is sharded, and only replicated state is taken from survivors"
        return Salvage(captured, point, ledger), ""

    def stage(self, attempt: str, slot: SlotRef, place: int, survivors: int) -> StagedShare:
        """Copy share ``place`` of ``survivors`` equal ones into ``slot``. Raises SnapshotError if it does not fit."""
        started = time.perf_counter()
        mesh = Mesh((("dp", survivors),))
        layouts = [found.layout for found in self.captured.tensors]
        aliases: Sequence[tuple[str, str]] = self.captured.aliases
        share = plan_share(layouts, mesh, place, aliases, plan_key(layouts, mesh, place, aliases))
        stager = Stager()
        used = stager.stage(self.captured, share, slot)
        stager.wait()
        return StagedShare(
            attempt=attempt,
            rank=place,
            world_size=survivors,
            mesh=mesh.axes,
            point=self.point,
            slot=slot,
            used_bytes=used,
            plan_key=share.key,
            plan=share.to_bytes(),
            objects=self.captured.objects,
            ledger=self.ledger,
            stall_s=time.perf_counter() - started,
        )
