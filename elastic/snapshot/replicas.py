"""Whether tensors that count as the same on several ranks are: a check of what nobody declared.

A plain tensor counts as replicated. Where it really is one rank's part of something larger, every rank's is right and
the snapshot would hold one of them. So where a mesh has axes that cut models, each rank keeps a few elements of every
tensor that counts as replicated over them beside its objects, and the durable commit compares.

Equal is meant loosely (TOLERANCE): replicas that drift by rounding are training's business. What is not found: parts
that are alike, such as a bias of zeros, until training has moved them apart; tensors of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from elastic.errors import CommitRefused
from elastic.mesh import MODEL_AXES, Mesh
from elastic.snapshot.index import ObjectTrees
from elastic.snapshot.layout import Box, Layout
from elastic.snapshot.names import listing
from elastic.snapshot.tree import Encoded, decode, encode_text

SAMPLES = 8
TOLERANCE = 0.05
"""Of the length of the sampled elements, as a vector."""


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
        return {"replicas": {"tensors": self._names, "samples": b"".join(parts)}}


def check_replicas(objects: ObjectTrees, where: str) -> None:
    """Raise CommitRefused naming the tensors if ranks hold different values of what counts as one tensor."""
    if len(objects.trees) < 2:
        return
    first: dict[tuple[str, tuple[int, ...]], tuple[int, np.ndarray[Any, Any]]] = {}
    differ: dict[str, str] = {}
    for digest in dict.fromkeys(objects.ranks):
        rank = objects.ranks.index(digest)
        replicas = decode(objects.trees[digest]).get("replicas")
        if not replicas:
            continue
        samples = np.frombuffer(replicas["samples"], np.float32)
        at = 0
        for name, offset, count in replicas["tensors"]:
            mine = np.nan_to_num(samples[at : at + count].astype(np.float64))
            at += count
            other, theirs = first.setdefault((name, tuple(offset)), (rank, mine))
            alike = len(mine) == len(theirs)
            if not alike or _length(mine - theirs) > TOLERANCE * max(_length(mine), _length(theirs)):
                differ.setdefault(name, f"ranks {other} and {rank}")
    if differ:
        name = min(differ)
        raise CommitRefused(
            f"{len(differ)} tensors count as the same on several ranks and are not: {listing(differ)} "
            f"({name} on {differ[name]})",
            where,
            "say what they are parts of, as elastic.declare(module, cuts={'weight': {'tp': 0}}), or who holds them, "
            "as held_at={'pp': 1}; or give all ranks the same values",
        )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most SAMPLES elements, spread over the tensor where its memory is in one piece; a view."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat[:: -(-flat.numel() // SAMPLES)]
    while tensor.dim() > 1:
        tensor = tensor[0]
    return tensor[:SAMPLES]


def _length(vector: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.square(vector).sum()))
