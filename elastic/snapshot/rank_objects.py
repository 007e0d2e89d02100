"""The objects that this rank restores, out of those of all ranks that saved: by coordinate, by rule, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.errors import CaptureError, RestoreError, TopologyMismatch
from elastic.mesh import Mesh
from elastic.snapshot.component import Component
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.object_state import ObjectState, lift, restored
from elastic.snapshot.per_rank import RankPlace, depends_on, same_place
from elastic.snapshot.tree import decode, encode


def settle(
    tree: dict[str, Any], index: SnapshotIndex, chosen: Sequence[Component], mesh: Mesh, rank: int, live: bool
) -> tuple[dict[str, Any], list[str], set[str]]:
    """``tree`` with this rank's state of each object that differs between ranks, notes, and objects to leave as built.

    ``live``: the ranks of the snapshot are survivors, numbered among themselves, so that a rank's own cannot be told.
    Raises TopologyMismatch for what has no rule; RestoreError for a live one, since an older snapshot may do.
    """
    same_mesh = mesh.axes == index.mesh.axes and not live
    if same_mesh or len(set(index.objects.ranks)) == 1:
        return tree, [], set()
    trees = {digest: decode(data)["components"] for digest, data in index.objects.trees.items()}
    components, notes, left = dict(tree["components"]), list[str](), set[str]()
    for component in chosen:
        if not isinstance(component, ObjectState):
            continue
        states = {digest: found[component.name]["state"] for digest, found in trees.items() if component.name in found}
        texts = {digest: encode(state, component.name) for digest, state in states.items()}
        if len(set(texts.values())) == 1:
            continue
        name, rule = component.name, component.on_resize
        if live:
            raise RestoreError(f"the state of {name!r} differs between ranks, and what the survivors hold is not all")
        by_rank = [texts.get(digest, b"") for digest in index.objects.ranks]
        axes = depends_on(index.mesh, by_rank)
        source = same_place(index.mesh, mesh, rank, axes)
        if source is not None:
            components[name] = {**components[name], "state": states[index.objects.ranks[source]]}
            notes.append(f"{name} by its place on {', '.join(axes)}")
        elif rule == "derive":
            left.add(name)
            notes.append(f"{name} as built: it is of each rank of {index.mesh}, and this is {mesh}")
        elif callable(rule):
            merged = rule(
                [restored(states[digest], {}) for digest in index.objects.ranks], RankPlace(rank, mesh, index.mesh)
            )
            components[name] = {**components[name], "state": lift(merged, name, _no_tensor, inline_bytes=None)}
            notes.append(f"{name} merged from the ranks of {index.mesh}")
        else:
            raise TopologyMismatch(
                f"the state of {name!r} differs between ranks along {', '.join(axes)}; it was saved on "
                f"{index.mesh}, and this is {mesh}",
                "restore",
                f"say what becomes of it: run.attach({name}=elastic.per_rank({name}, on_resize='derive')), or a "
                f"function merge(states, place) instead of 'derive'; or restore on {index.mesh}",
            )
    return {**tree, "components": components}, notes, left


def _no_tensor(name: str, tensor: Any) -> None:
    raise CaptureError(f"a tensor of {tensor.nbytes} bytes cannot be merged", name, "return dense tensors on the CPU")
