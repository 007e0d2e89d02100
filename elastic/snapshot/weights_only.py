"""The weights of a snapshot without the rest: what is left of its chunk table and its objects. Pure.

Weights alone are a snapshot of their own kind, committed and verified like any other, under the name of a run beside
the one that made them. So no run ever resumes from them, they have retention of their own, and every command that reads
snapshots reads these.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from elastic.errors import SnapshotError
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.index import ObjectTrees, SnapshotIndex
from elastic.snapshot.seal import digest_objects

SUFFIX = ".weights"


def weights_run(run: str) -> str:
    """The run under whose name the weights of ``run`` are kept."""
    return run + SUFFIX


def weights_objects(objects: bytes) -> bytes:
    """Of a tree of objects (see tree) the components that are modules, as the same canonical JSON."""
    components = {name: part for name, part in json.loads(objects)["components"].items() if part["kind"] == "model"}
    return json.dumps({"components": components, "extra": {}}, separators=(",", ":")).encode()


def weights_table(table: ChunkTable, objects: bytes) -> ChunkTable:
    """The rows of ``table`` that hold tensors of modules, with the tensors that their tied names stand for.

    Raises SnapshotError if ``objects``, the tree that goes with the table, tells of no module.
    """
    modules = tuple(f"{name}." for name in json.loads(weights_objects(objects))["components"])
    if not modules:
        raise SnapshotError("there are no weights in it: no module is attached", cure="leave weights_every out")
    tied = {name for alias, name in table.aliases if alias.startswith(modules)}
    held = np.array([spec.name.startswith(modules) or spec.name in tied for spec in table.specs], bool)
    names = {spec.name for spec, stays in zip(table.specs, held) if stays}
    chosen = table.take(np.flatnonzero(held[table.tensor_id]) if len(held) else np.zeros(0, np.int64))
    place = (np.cumsum(held) - 1).astype(np.int32)
    return replace(
        chosen,
        specs=tuple(spec for spec, stays in zip(table.specs, held) if stays),
        tensor_id=place[chosen.tensor_id] if len(held) else chosen.tensor_id,
        aliases=tuple((alias, name) for alias, name in table.aliases if alias.startswith(modules) and name in names),
    )


def weights_index(index: SnapshotIndex) -> SnapshotIndex:
    """The index of the weights alone."""
    algorithm = index.table.algorithm
    kept = {digest: weights_objects(tree) for digest, tree in index.objects.trees.items()}
    renamed = {digest: digest_objects(tree, algorithm) for digest, tree in kept.items()}
    return replace(
        index,
        table=weights_table(index.table, index.objects.of(0)),
        objects=ObjectTrees(
            tuple(renamed[digest] for digest in index.objects.ranks),
            {renamed[digest]: tree for digest, tree in kept.items()},
        ),
    )
