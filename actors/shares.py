"""How a rank reads a snapshot: own node's memory first, then peers, then durable storage; every byte checked.

The rank assembles the index from the headers that the stores hold and copies straight from the maps of its own node's
arenas. What a peer or the store of blobs sends is checked on arrival; a bad or missing copy falls through to the next.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from actors.names import NAMESPACE, store_name
from elastic.errors import CorruptSnapshot, RestoreError, SnapshotError
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot, RestoreOrder
from elastic.snapshot.blob_copy import BlobCopy
from elastic.snapshot.held_share import ShareHeader
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.node_tier import index_of_headers
from elastic.snapshot.object_names import parse_node_pack
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.sources import Copy, Rows, ServedCopy, TwinCopy, VerifiedSource
from elastic.storage.blob_store import open_store

log = logging.getLogger("elastic.shares")

PEER_TIMEOUT_S = 30.0


class StoreReader:
    """Opens snapshots of either tier for one rank."""

    def __init__(self, run: str, node: str, storage: str) -> None:
        self.run, self.node, self.storage = run, node, storage

    def open(self, order: RestoreOrder) -> tuple[SnapshotIndex, VerifiedSource, str]:
        """Index and source of the snapshot that was ordered, and its tier. Raises RestoreError."""
        if order.node is None:
            if order.remote is None:
                raise RestoreError("nothing to restore from was named")
            index, copy, _ = self._remote(order.remote)
            return index, VerifiedSource([copy]), "remote"
        index = self._node_index(order.node)
        copies: list[Copy] = [
            ServedCopy("own node", _OwnMemory(self.run, self.node).serve, mapped=True),
            ServedCopy("peer", _PeerMemory(self.run, self.node, order.node).serve),
        ]
        if order.remote is not None:
            copies.append(_Lazy("remote", lambda: self._twin(order.remote)))
        return index, VerifiedSource(copies), "node"

    def _node_index(self, snapshot: NodeSnapshot) -> SnapshotIndex:
        """The index from the headers of all shares, each from the nearest store that holds it."""
        wanted: dict[str, list[int]] = {}
        for rank, places in snapshot.places.items():
            wanted.setdefault(self.node if self.node in places else places[0], []).append(rank)
        headers: dict[int, bytes] = {}
        for node, ranks in wanted.items():
            headers |= self._headers(snapshot, node, tuple(ranks))
        for rank, places in snapshot.places.items():
            for node in places:
                if rank not in headers:
                    headers |= self._headers(snapshot, node, (rank,))
        return index_of_headers(
            snapshot.attempt, {rank: ShareHeader.from_bytes(data) for rank, data in headers.items()}
        )

    def _headers(self, snapshot: NodeSnapshot, node: str, ranks: tuple[int, ...]) -> dict[int, bytes]:
        try:
            store = ray.get_actor(store_name(self.run, node), namespace=NAMESPACE)
            found: dict[int, bytes] = ray.get(store.headers.remote(snapshot.attempt, ranks), timeout=PEER_TIMEOUT_S)
            return found
        except (RayError, ValueError) as error:
            log.warning("the store of node %s does not answer: %s", node[:8], error)
            return {}

    def _remote(self, snapshot: RemoteSnapshot) -> tuple[SnapshotIndex, BlobCopy, SnapshotRef]:
        catalog = SnapshotCatalog(open_store(snapshot.storage or self.storage), snapshot.run or self.run)
        ref = next((ref for ref in catalog.list() if ref.attempt == snapshot.attempt), None)
        if ref is None:
            raise CorruptSnapshot(f"the snapshot of step {snapshot.step} is no longer there", self.storage)
        return catalog.open(ref), BlobCopy(catalog.store, ref.snapshots), ref

    def _twin(self, snapshot: RemoteSnapshot) -> Copy:
        index, copy, _ = self._remote(snapshot)
        return TwinCopy(index.table, copy)


class _OwnMemory:
    """Ranges of packs in this node's arenas, as views of the rank's own map of the slot."""

    def __init__(self, run: str, node: str) -> None:
        self._store = ray.get_actor(store_name(run, node), namespace=NAMESPACE)
        self._maps: dict[str, np.ndarray[Any, Any] | None] = {}

    def serve(self, pack: str, byte_start: Rows, nbytes: Rows) -> Sequence[memoryview] | None:
        if pack not in self._maps:
            slot = ray.get(self._store.locate.remote(pack), timeout=PEER_TIMEOUT_S)
            self._maps[pack] = None if slot is None else np.memmap(slot.path, np.uint8, mode="r")
        data = self._maps[pack]
        if data is None:
            return None
        view = memoryview(data)
        return [view[start : start + size] for start, size in zip(byte_start.tolist(), nbytes.tolist())]


class _PeerMemory:
    """Ranges of packs in other nodes' memory, sent by their stores."""

    def __init__(self, run: str, node: str, snapshot: NodeSnapshot) -> None:
        self._run, self._node, self._places = run, node, snapshot.places

    def serve(self, pack: str, byte_start: Rows, nbytes: Rows) -> Sequence[memoryview] | None:
        _, rank = parse_node_pack(pack)
        for node in self._places.get(rank, ()):
            if node == self._node:
                continue
            try:
                store = ray.get_actor(store_name(self._run, node), namespace=NAMESPACE)
                joined = ray.get(store.serve.remote(pack, byte_start, nbytes), timeout=PEER_TIMEOUT_S)
            except (RayError, ValueError, SnapshotError) as error:
                log.warning("node %s does not serve %s: %s", node[:8], pack, error)
                continue
            view, ends = memoryview(joined), np.cumsum(nbytes)
            return [view[end - size : end] for end, size in zip(ends.tolist(), nbytes.tolist())]
        return None


class _Lazy:
    """A copy that is opened when it is first needed: durable storage is not touched while memory has everything."""

    def __init__(self, name: str, make: Any) -> None:
        self.name, self._make, self._copy = name, make, None
        self._damaged: list[str] = []

    @property
    def damaged(self) -> list[str]:
        return self._copy.damaged if self._copy is not None else self._damaged

    def fetch(self, table: Any, rows: Rows) -> list[Any]:
        """See ``Copy.fetch``."""
        if self._copy is None:
            try:
                self._copy = self._make()
            except RestoreError as error:
                self._damaged.append(str(error))
                return [None] * len(rows)
        return self._copy.fetch(table, rows)
