"""A few elements of every tensor that counts as the same on several ranks, for the check of ``replica_check``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.mesh import MODEL_AXES, Mesh
from elastic.snapshot.layout import Box, Layout
from elastic.snapshot.tree import Encoded, encode_text

SAMPLES = 8


class ReplicaSamples:
    """Elements of every tensor of this rank that others count as theirs too, read at each snapshot."""

    def __init__(self, layouts: Sequence[Layout], tensors: Sequence[torch.Tensor], boxes: Sequence[Box | None],
                 mesh: Mesh) -> None:  # fmt: skip
        axes = {axis for axis in MODEL_AXES if mesh.size(axis) > 1}
        self._views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        names: dict[tuple[torch.device, torch.dtype], list[list[Any]]] = {}
        for layout, tensor, box in zip(layouts, tensors, boxes) if axes else ():
            known = layout.axes.union(axis for axis, _ in layout.held_at)
            if axes - known and tensor.numel() and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                kind, view = (tensor.device, tensor.dtype), _sample(tensor.detach())
                self._views.setdefault(kind, []).append(view)
                names.setdefault(kind, []).append([layout.spec.name, list(box.offset) if box else [], view.numel()])
        flat = [name for kind in names.values() for name in kind]
        self._names = Encoded(encode_text(flat)) if flat else None

    def tree(self) -> dict[str, object]:
        """The samples now, to keep beside the objects; empty where nothing counts as replicated."""
        if self._names is None:
            return {}
        parts = [torch.cat(views).to("cpu", torch.float32).numpy().tobytes() for views in self._views.values()]
        return {"replicas": {"tensors": self._names, "elements": b"".join(parts)}}


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most SAMPLES elements, spread over the tensor where its memory is in one piece; a view."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat[:: -(-flat.numel() // SAMPLES)]
    while tensor.dim() > 1:
        tensor = tensor[0]
    return tensor[:SAMPLES]
