"""One attached object, as a snapshot sees it: tensors with their layouts, a tree of the rest, and the way back.

The kinds share this shape and differ in how they find their tensors: modules (module_state), optimizers
(optimizer_state) and everything else that has ``state_dict`` and ``load_state_dict`` (object_state).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from elastic.snapshot.layout import Box, Layout, TensorSpec
from elastic.snapshot.versions import VersionDifference

MODEL, OPTIMIZER, SCHEDULER, SCALER, LOADER, OBJECT = "model", "optimizer", "scheduler", "scaler", "loader", "object"

RESTORED_KINDS = {
    "strict": frozenset({MODEL, OPTIMIZER, SCHEDULER, SCALER, LOADER, OBJECT}),
    "training": frozenset({MODEL, OPTIMIZER, SCHEDULER, SCALER, OBJECT}),
    "weights": frozenset({MODEL}),
}
"""What each restore mode restores; the rest keeps what the program gave it, and the report says so."""


Memory = tuple[int, str]
"""Where a tensor begins, and the name of its dtype if it is contiguous CPU memory, else nothing."""


def memory_of(tensor: torch.Tensor) -> Memory:
    """The memory behind a tensor of this rank."""
    as_it_is = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return tensor.data_ptr(), str(tensor.dtype).removeprefix("torch.") if as_it_is else ""


class Target:
    """Memory of this rank, from ``address`` on, that a restore fills with ``box`` (None: all) of the saved ``spec``.

    ``live`` memory is state already; other memory becomes state in ``finish``, and nothing is lost with it before.
    ``plain``: it takes the saved bytes as they are, being contiguous CPU memory of the saved dtype.
    """

    __slots__ = ("address", "box", "live", "plain", "spec", "tensor")

    def __init__(
        self, spec: TensorSpec, box: Box | None, tensor: torch.Tensor, live: bool = True, known: Memory | None = None
    ) -> None:
        # No dataclass: there are tens of thousands, and asking a tensor for its address costs as much as all the rest.
        self.spec, self.box, self.tensor, self.live = spec, box, tensor, live
        self.address, plain_dtype = known or memory_of(tensor)
        self.plain = plain_dtype == spec.dtype


@dataclass(frozen=True, slots=True)
class Saved:
    """What a snapshot holds of one component: its tensors by full name, their ties, and its tree."""

    tensors: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    tree: object

    def find(self, name: str) -> TensorSpec | None:
        """The saved tensor called ``name``, also if that is the alias of a tied one."""
        return self.tensors.get(self.aliases.get(name, name))


@dataclass(slots=True)
class Differences:
    """How live and saved state differ, gathered over all components before anything is decided."""

    missing: list[str] = field(default_factory=list)
    """Live, but not in the snapshot."""
    unexpected: list[str] = field(default_factory=list)
    """In the snapshot, but not live."""
    shapes: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    versions: list[VersionDifference] = field(default_factory=list)
    """Of the kind of an optimizer, or of the data."""


class Component(Protocol):
    """An attached object. ``layouts`` and ``tensors`` go together, in an order that is the same on all holders."""

    name: str
    kind: str
    layouts: list[Layout]
    tensors: list[torch.Tensor]

    def refresh(self) -> bool:
        """Look again; True if ``layouts`` or ``tensors`` are not what they were."""

    def tree(self) -> object:
        """Everything that is not a tensor, for tree.encode."""

    def plan(self, saved: Saved, differences: Differences) -> list[Target]:
        """What to read, without touching anything live. Differences are noted, not judged."""

    def finish(self) -> None:
        """All targets are filled: put the rest in its place."""


AddTensor = Callable[[str, torch.Tensor], None]
