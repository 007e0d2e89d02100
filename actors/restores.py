"""What a node's store does for the restores of its ranks: the index is assembled once, each chunk is fetched once.

Peers are asked first, evenly (see SourceChoice), then durable storage; every byte is checked on arrival. The ranks copy
from the map that all of them share (see NodeFetch).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import RayError

from actors.names import NAMESPACE, store_name
from actors.share_socket import ShareAddress, fetch_ranges
from elastic.errors import CorruptSnapshot, ElasticError, RestoreError, SnapshotError, StorageError
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot, RestoreOrder
from elastic.snapshot.assemble import index_of_headers
from elastic.snapshot.blob_copy import BlobCopy
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.held_share import ShareHeader
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.node_fetch import NodeFetch
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.source_choice import NOWHERE, SourceChoice
from elastic.snapshot.sources import Chunk, Copy, Rows, TwinCopy, VerifiedSource, verified
from elastic.storage.blob_store import open_store

log = logging.getLogger("elastic.restores")

PEER_TIMEOUT_S = 30.0
PIECE_BYTES = 8 << 20
"""Most bytes that a peer is asked for at once."""
PIECES_ON_THE_WAY = 4


@dataclass(frozen=True, slots=True)
class Opened:
    """An open restore. ``index`` refers to the SnapshotIndex, which all ranks of the node share."""

    index: Any
    tier: str
    window_bytes: int


class Restores:
    """At most one restore at a time, of the newest generation that asked for one."""

    def __init__(self, run: str, node: str, storage: str, tier: NodeTier) -> None:
        self.run, self.node, self.storage, self.tier = run, node, storage, tier
        self._generation = -1
        self._opened: Opened | None = None
        self._fetch: NodeFetch | None = None
        self._lock = threading.Lock()

    def open(self, generation: int, order: RestoreOrder, readers: int) -> Opened | ElasticError:
        """Index and tier of the snapshot that was ordered; the first of the ``readers`` to ask has it assembled."""
        with self._lock:
            if generation < self._generation:
                return RestoreError(f"generation {generation} is over; the store has seen {self._generation}")
            if generation > self._generation or self._opened is None:
                self._drop()
                self._generation = generation
                try:
                    index, source = self._open(order)
                except ElasticError as error:
                    return error
                path = self.tier.arena.directory / f"slot-fetched-{generation}"
                self._fetch = NodeFetch(path, index.table, source, readers)
                # Tables can be large: through the object store all ranks see the same memory.
                self._opened = Opened(ray.put(index), order.tier, self._fetch.window_bytes)
            return self._opened

    def of(self, generation: int) -> NodeFetch:
        """The open restore of ``generation``. Raises StorageError if it is over."""
        with self._lock:
            if self._fetch is None or generation != self._generation:
                raise StorageError(f"the restore of generation {generation} is over", self.node)
            return self._fetch

    def leave(self, generation: int, reader: int) -> None:
        """A reader is done; after the last one the memory is given back."""
        with self._lock:
            if generation == self._generation and self._fetch is not None and self._fetch.leave(reader):
                self._drop()

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._fetch is not None:
            self._fetch.close()
        self._fetch = self._opened = None

    def _open(self, order: RestoreOrder) -> tuple[SnapshotIndex, VerifiedSource]:
        if order.node is None:
            if order.remote is None:
                raise RestoreError("nothing to restore from was named")
            index, copy = self._remote(order.remote)
            return index, VerifiedSource([copy])
        index = self._node_index(order.node)
        copies: list[Copy] = [_Peers(self.run, self.node, index.table, order.node)]
        if (remote := order.remote) is not None:
            copies.append(_Lazy("remote", lambda: self._twin(remote)))
        return index, VerifiedSource(copies)

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
        if node == self.node:
            return self.tier.headers(snapshot.attempt, ranks)
        try:
            store = ray.get_actor(store_name(self.run, node), namespace=NAMESPACE)
            found: dict[int, bytes] = ray.get(store.headers.remote(snapshot.attempt, ranks), timeout=PEER_TIMEOUT_S)
            return found
        except (RayError, ValueError) as error:
            log.warning("the store of node %s does not answer: %s", node[:8], error)
            return {}

    def _remote(self, snapshot: RemoteSnapshot) -> tuple[SnapshotIndex, BlobCopy]:
        catalog = SnapshotCatalog(open_store(snapshot.storage or self.storage), snapshot.run or self.run)
        ref = next((ref for ref in catalog.list() if ref.attempt == snapshot.attempt), None)
        if ref is None:
            raise CorruptSnapshot(f"the snapshot of step {snapshot.step} is no longer there", self.storage)
        return catalog.open(ref), BlobCopy(catalog.store, ref.snapshots)

    def _twin(self, snapshot: RemoteSnapshot) -> Copy:
        index, copy = self._remote(snapshot)
        return TwinCopy(index.table, copy)


class _Peers:
    """Chunks in other nodes' memory, sent by their stores, a few pieces at a time."""

    name = "peer"

    def __init__(self, run: str, node: str, table: ChunkTable, snapshot: NodeSnapshot) -> None:
        self._run = run
        places = {rank: tuple(n for n in nodes if n != node) for rank, nodes in snapshot.places.items()}
        self._choice = SourceChoice(table.packs, places, node)
        self._addresses: dict[str, ShareAddress] = {}
        self.damaged: list[str] = []

    def fetch(self, table: ChunkTable, rows: Rows) -> list[Chunk | None]:
        """See ``Copy.fetch``."""
        room = [memoryview(bytearray(size)) for size in table.nbytes[rows].tolist()]
        return [chunk if good else None for chunk, good in zip(room, self.fetch_into(table, rows, room))]

    def fetch_into(self, table: ChunkTable, rows: Rows, targets: Sequence[memoryview]) -> npt.NDArray[np.bool_]:
        """See ``FillingCopy.fetch_into``. A chunk that a node lacks or has damaged is asked of the next that has it."""
        good = np.zeros(len(rows), bool)
        turn, left = 0, np.arange(len(rows))
        while len(left):
            asked = self._choice.choose(table.pack_id[rows[left]], turn)
            left, asked = left[asked != NOWHERE], asked[asked != NOWHERE]
            pieces = self._pieces(table, rows, left, asked)
            with ThreadPoolExecutor(PIECES_ON_THE_WAY, thread_name_prefix="peer") as threads:

                def fetch(piece: tuple[Rows, str]) -> list[Chunk | None]:
                    at, node = piece
                    return self._from(node, table, rows[at], [targets[i] for i in at.tolist()])

                for (at, _), chunks in zip(pieces, threads.map(fetch, pieces)):
                    good[at] = [chunk is not None for chunk in chunks]
            left = left[~good[left]]
            turn += 1
        return good

    def _pieces(self, table: ChunkTable, rows: Rows, left: Rows, asked: Rows) -> list[tuple[Rows, str]]:
        """Positions of rows of one pack and one node, in the order of their bytes, with the node's name."""
        packs, starts, nbytes = table.pack_id[rows[left]], table.byte_start[rows[left]], table.nbytes[rows[left]]
        order = np.lexsort(np.stack([starts, packs.astype(np.int64), asked]))
        part = np.cumsum(nbytes[order]) // PIECE_BYTES
        keys = np.stack([asked[order], packs[order], part], axis=1)
        edges = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
        return [(left[at], self._choice.nodes[int(asked[at[0]])]) for at in np.split(order, edges) if len(at)]

    def _from(self, node: str, table: ChunkTable, rows: Rows, targets: list[memoryview]) -> list[Chunk | None]:
        """One piece, checked where it arrives."""
        ranges = np.stack([table.byte_start[rows], table.nbytes[rows]], axis=1)
        try:
            fetch_ranges(self._address(node), table.packs[table.pack_id[rows[0]]], ranges, targets)
        except (RayError, ValueError, SnapshotError) as error:
            log.warning("node %s does not serve %d chunks: %s", node[:8], len(rows), error)
            return [None] * len(rows)
        return verified(table, rows, targets, self)

    def _address(self, node: str) -> ShareAddress:
        """Where the node serves its shares. Raises ValueError if it has no store, RayError if that does not answer."""
        if node not in self._addresses:
            store = ray.get_actor(store_name(self._run, node), namespace=NAMESPACE)
            self._addresses[node] = ray.get(store.share_address.remote(), timeout=PEER_TIMEOUT_S)
        return self._addresses[node]


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
