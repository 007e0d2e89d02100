"""The objects of all ranks of a snapshot as one, for ranks that hold other parts than any of those that wrote. Pure.

What each rank knows of its own parameters (groups and options of an optimizer, which state there is, extra state of
modules) adds up by name: a stage's optimizer lists the stage's parameters alone. Everything else is the first rank's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.snapshot.component import MODEL, OPTIMIZER
from elastic.snapshot.index import ObjectTrees
from elastic.snapshot.tree import decode, encode


def merged_objects(objects: ObjectTrees, first: int) -> dict[str, Any]:
    """The tree of rank ``first`` with what other ranks say of parameters that it does not hold. Each distinct tree is
    read once."""
    digests = dict.fromkeys((objects.ranks[first], *objects.ranks))
    trees = [decode(objects.trees[digest]) for digest in digests]
    found: dict[str, Any] = trees[0]
    if len(trees) == 1:
        return found
    components: dict[str, Any] = {}
    for tree in trees:
        for name in tree["components"]:
            components.setdefault(name, [])
    for name in components:
        parts = [tree["components"][name] for tree in trees if name in tree["components"]]
        kind = parts[0].get("kind")
        if kind == MODEL:
            components[name] = _merged_module(parts)
        elif kind == OPTIMIZER and "groups" in parts[0]:
            components[name] = _merged_optimizer(parts)
        else:
            components[name] = parts[0]
    return {**found, "components": components}


def _merged_module(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for part in parts:
        for name, value in part.get("extra", {}).items():
            extra.setdefault(name, value)
    return {**parts[0], "extra": extra} if extra else dict(parts[0])


def _merged_optimizer(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Groups with the same number and the same options are one. A parameter counts once, as the first rank has it."""
    groups: list[list[dict[str, Any]]] = []
    known: set[str] = set()
    states: dict[tuple[str, ...], list[str]] = {}
    stated: set[str] = set()
    values: dict[tuple[str, str], Any] = {}
    for part in parts:
        for number, group in enumerate(part["groups"]):
            names = [name for name in group["params"] if name not in known]
            known.update(names)
            if number == len(groups):
                groups.append([{**group, "params": names}])
                continue
            same = next((other for other in groups[number] if _options(other) == _options(group)), None)
            if same is not None:
                same["params"] += names
            elif names:
                groups[number].append({**group, "params": names})
        news = {name for _, names in part["state"] for name in names} - stated
        for keys, names in part["state"]:
            states.setdefault(tuple(keys), []).extend(name for name in names if name in news)
        stated |= news
        for name, key, value in part["values"]:
            values.setdefault((name, key), value)
    return {
        **parts[0],
        "groups": [group for variants in groups for group in variants],
        "state": [[list(keys), names] for keys, names in states.items()],
        "values": [[name, key, value] for (name, key), value in values.items()],
    }


def _options(group: Mapping[str, Any]) -> bytes:
    return encode(group["options"], "options")
