"""From which node's memory each chunk is read: the reader's own, else one of those that hold it, evenly. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from elastic.snapshot.object_names import parse_node_pack

NOWHERE = -1
"""In place of a node where no living one holds the chunk: durable storage is left."""

Ints = npt.NDArray[np.int64]


class SourceChoice:
    """The nodes that ``reader`` asks for each pack of the node tier, in turn, in columns.

    ``places`` gives for each rank the nodes that hold its share (``NodeSnapshot.places``). The reader itself comes
    first. The others are turned by pack and reader, so that of R replicas each serves one R-th of all reads.
    """

    def __init__(self, packs: Sequence[str], places: Mapping[int, tuple[str, ...]], reader: str) -> None:
        number: dict[str, int] = {reader: 0}
        held = [places.get(parse_node_pack(pack)[1], ()) for pack in packs]
        width = max(1, max(map(len, held), default=0))
        found = np.full((len(packs), width), NOWHERE, np.int64)
        for pack, nodes in enumerate(held):
            for place, node in enumerate(nodes):
                found[pack, place] = number.setdefault(node, len(number))
        count = np.maximum((found != NOWHERE).sum(axis=1, keepdims=True), 1)
        turned = (np.arange(width) + np.arange(len(packs))[:, None] + sum(reader.encode())) % count
        order = np.where(found == 0, -1, np.where(found == NOWHERE, width, turned))
        self._node = np.take_along_axis(found, np.argsort(order, axis=1, kind="stable"), axis=1)
        self.nodes = tuple(number)
        """The reader, then every other node that holds something."""

    def choose(self, pack_id: npt.NDArray[np.int32], turn: int = 0) -> Ints:
        """For each chunk, by its pack, the place in ``nodes`` of the ``turn``-th one to ask; NOWHERE after the last."""
        if turn >= self._node.shape[1]:
            return np.full(len(pack_id), NOWHERE, np.int64)
        return np.asarray(self._node[pack_id, turn])
