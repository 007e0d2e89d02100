"""Whether tensors that count as the same on several ranks are: a check of what nobody declared. Pure.

A plain tensor counts as replicated. Where it really is one rank's part of something larger, every rank's is right and
the snapshot would hold one of them. So where a mesh has axes that cut models, each rank keeps a few elements of every
tensor that counts as replicated over them beside its objects, and the durable commit compares.

Equal is meant loosely (TOLERANCE): replicas that drift by rounding are training's business. What is not found: parts
that are alike, such as a bias of zeros, until training has moved them apart; tensors of integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elastic.errors import CommitRefused
from elastic.snapshot.index import ObjectTrees
from elastic.snapshot.names import listing
from elastic.snapshot.tree import decode

TOLERANCE = 0.05
"""Of the length of the sampled elements, as a vector."""


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
        samples = np.frombuffer(replicas["elements"], np.float32)
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


def _length(vector: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.square(vector).sum()))
