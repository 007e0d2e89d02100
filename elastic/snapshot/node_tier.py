"""The node tier: the shares that this node holds in its arena, its own and replicas of its peers'.

A share goes through: opened (a rank copies into its slot), sealed (hashed, copied to a peer), committed (readable).
What is not committed is never readable. At most one attempt is the committed one; when the next is committed the
former's slots are given back, each as soon as nobody reads it any more.

Thread-safe: bookkeeping happens under one lock, bytes are moved and hashed outside of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from elastic.errors import CorruptSnapshot, InternalError, SnapshotError
from elastic.protocol.shares import ShareReport, SlotRef, StagedShare
from elastic.snapshot.arena import ArenaPool
from elastic.snapshot.assemble import index_of_headers
from elastic.snapshot.attempts import AttemptBook
from elastic.snapshot.checksum import DEFAULT_ALGORITHM, check_algorithm
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.drain_threads import drain_threads
from elastic.snapshot.held_share import HeldShare, ShareHeader
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.manifest import FileRecord, SnapshotRef
from elastic.snapshot.object_names import node_pack, parse_node_pack
from elastic.snapshot.plan_tables import PlanTables
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.seal import digest_chunks, seal, table_digest
from elastic.snapshot.sources import Copy, Serve, ServedCopy, VerifiedSource
from elastic.snapshot.uploader import upload_shares
from elastic.snapshot.weights_only import weights_table
from elastic.storage.blob_store import BlobStore

Place = Callable[[bytes, int], memoryview]

KEPT_SLOTS = 2
"""Slots per share besides those in flight: the committed snapshot, and one for the live tier."""
KEPT_UPLOADS = 4
"""Two whole snapshots and two of weights alone: one on its way, and the one that it is compared with."""
MAX_DEPTH = 16
"""A snapshot that would refer to one this deep is written in full."""


class NodeTier:
    """Everything a node's store does with snapshots in memory. ``directory`` is made, and removed by ``close``.

    The threads that hash and upload are ``nice`` more nice than the process.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        algorithm: str = DEFAULT_ALGORITHM,
        max_in_flight: int = 1,
        threads: int = 2,
        nice: int = 0,
    ) -> None:
        self.algorithm = check_algorithm(algorithm).name
        self.max_in_flight = max_in_flight
        self.arena = ArenaPool(directory)
        self.nice = nice
        self.threads = drain_threads(threads, "seal", nice)
        self._book = AttemptBook(self.arena)
        self._lock = threading.Lock()
        self._plans = PlanTables(self.algorithm)
        self._uploaded: dict[str, ChunkTable] = {}
        self._uploading: dict[str, dict[int, ShareHeader]] = {}
        """Headers of what was last brought to storage: its commit comes later than the next node snapshots."""

    # ---- before the first snapshot

    def reserve(self, nbytes_per_share: int, shares: int, replicas: int = 0) -> None:
        """Make and touch the slots for ``shares`` own shares and ``replicas`` of peers, of so many bytes each.

        Idempotent; call again when shares grow. Raises StorageError with the numbers if there is too little room.
        """
        self.arena.reserve((shares + replicas) * (self.max_in_flight + KEPT_SLOTS), nbytes_per_share)

    # ---- making a snapshot

    def open_attempt(
        self, attempt: str, shares: Mapping[int, int], replicas: Mapping[int, int] | None = None
    ) -> dict[int, SlotRef] | None:
        """A slot for each rank of ``shares`` (rank to bytes), or None if too few are free: then nothing is taken.

        ``replicas`` keeps slots for shares that peers will send. Opening the same attempt again gives the same slots.
        """
        return self._book.open(attempt, shares, replicas or {})

    def seal(self, staged: StagedShare) -> ShareReport:
        """Hash the share that a rank staged and hold it. Raises SnapshotError if the attempt is not open any more."""
        started = time.perf_counter()
        pieces = self._plans.of(staged.plan_key, staged.plan)
        self._book.check_open(staged.attempt, staged.rank, staged.slot)
        if len(pieces) and int((pieces.byte_start + pieces.nbytes).max()) > staged.used_bytes:
            raise InternalError(f"rank {staged.rank} staged {staged.used_bytes} bytes, its plan needs more")
        with self.arena.holding(staged.slot) as data:
            table = seal(replace(pieces, packs=(node_pack(staged.attempt, staged.rank),)), data, self.threads)
        header = ShareHeader(
            staged.attempt,
            staged.rank,
            staged.world_size,
            staged.mesh,
            staged.point,
            staged.used_bytes,
            table_digest(table, staged.objects),
            table,
            staged.objects,
            staged.stall_s,
            dict(staged.parts_s),
            staged.ledger,
            staged.agreements,
        )
        self._book.hold(HeldShare(header, staged.slot))
        return header.report({"hash": time.perf_counter() - started})

    def export_share(self, attempt: str, rank: int) -> tuple[bytes, memoryview]:
        """Header and bytes of a sealed share, for a peer. The bytes are those of the arena: keep the attempt, or
        ``pin`` it, until they are sent."""
        share = self._book.shares(attempt).get(rank)
        if share is None:
            raise SnapshotError(f"the share of rank {rank} is not held on this node", f"attempt {attempt}")
        data = self.arena.view(share.slot)[: share.header.used_bytes]
        return share.header.to_bytes(), data.data.toreadonly()

    def receive_share(self, attempt: str, rank: int, fill: Callable[[Place], None]) -> ShareReport:
        """Hold a replica of a peer's share; every chunk is checked after it has arrived in the arena.

        ``fill`` is given a function that answers the header and the number of bytes with the memory that they go to.
        Raises CorruptSnapshot if a chunk arrived damaged, SnapshotError if no slot is free; the share is then not held.
        """
        started = time.perf_counter()
        taken: list[HeldShare] = []

        def place(header: bytes, nbytes: int) -> memoryview:
            head = ShareHeader.from_bytes(header)
            if (head.attempt, head.rank) != (attempt, rank):
                raise InternalError(f"share {head.attempt}/{head.rank} was sent as {attempt}/{rank}")
            if nbytes != head.used_bytes:
                raise CorruptSnapshot(f"share of rank {rank} has {nbytes} bytes instead of {head.used_bytes}", attempt)
            taken.append(HeldShare(head, self._book.take_for_replica(attempt, rank, nbytes)))
            return self.arena.view(taken[0].slot)[:nbytes].data

        try:
            fill(place)
            self._check_rows(taken[0].header.table, self.arena.view(taken[0].slot))
        except BaseException:
            for share in taken:
                self.arena.release(share.slot)
            raise
        self._book.hold_replica(taken[0])
        return taken[0].header.report({"replicate": time.perf_counter() - started})

    def commit(self, attempt: str) -> None:
        """Make ``attempt`` the committed one here; the former is given back as soon as nobody reads it. Idempotent.

        A node that holds no share of the attempt only gives the former back.
        """
        self._book.commit(attempt)

    def abandon(self, attempt: str, *, ranks_quiet: bool = False) -> None:
        """Forget an attempt that is not committed. Unknown and committed attempts stay as they are.

        A rank that has not handed its share over may still be copying: unless ``ranks_quiet`` says that none does,
        its slot gets a new file, so that a late write lands nowhere.
        """
        self._book.abandon(attempt, ranks_quiet)

    def abandon_open(self, *, ranks_quiet: bool = False) -> None:
        """Forget every attempt that is not committed: a new generation closes all that is open."""
        for attempt in self._book.names(committed=False):
            self.abandon(attempt, ranks_quiet=ranks_quiet)

    # ---- what is held

    @property
    def committed(self) -> str | None:
        """The committed attempt, or None."""
        return self._book.committed

    def held(self) -> dict[str, set[int]]:
        """Ranks whose shares of the committed attempt are here, own and replicas."""
        return {name: ranks for name, ranks in self._book.names(committed=True).items() if ranks}

    def pending(self) -> dict[str, set[int]]:
        """Ranks whose shares are sealed here, per attempt that is not committed."""
        return self._book.names(committed=False)

    def reports(self) -> dict[str, tuple[dict[int, ShareReport], int]]:
        """For each attempt, committed or not, the reports of the shares that are held here, own and replicas, and how
        many shares it has in all. For a controller that comes back."""
        found = {}
        for attempt in (*self._book.names(committed=True), *self._book.names(committed=False)):
            shares = self._book.shares(attempt)
            world_size = max((share.header.world_size for share in shares.values()), default=0)
            found[attempt] = ({rank: share.header.report({}) for rank, share in shares.items()}, world_size)
        return found

    def tables(self, attempt: str) -> dict[int, ChunkTable]:
        """The chunk table of every share of the committed attempt."""
        return {rank: share.header.table for rank, share in self._book.readable(attempt).items()}

    def headers(self, attempt: str, ranks: Sequence[int] | None = None) -> dict[int, bytes]:
        """Headers of the shares held here (all, or those of ``ranks``), for whoever assembles the index. Those of an
        attempt that was uploaded are kept for its commit, also when its bytes are not held any more."""
        found = self._headers(attempt)
        return {rank: header.to_bytes() for rank, header in found.items() if ranks is None or rank in ranks}

    def index(self, attempt: str, headers: Mapping[int, bytes] | None = None, snapshot_id: str = "") -> SnapshotIndex:
        """The index of a snapshot from the headers of all its shares; those held here need not be given.

        Raises CommitRefused if the shares are not one point in time, CorruptSnapshot if one is missing.
        """
        found = self._headers(attempt)
        for rank, data in (headers or {}).items():
            if rank not in found:
                found[rank] = ShareHeader.from_bytes(data)
        return index_of_headers(attempt, found, snapshot_id)

    @contextmanager
    def pinned(self, attempt: str) -> Iterator[dict[int, HeldShare]]:
        """The shares of an attempt, their slots held as long as the block runs."""
        shares = self.pin(attempt)
        try:
            yield shares
        finally:
            self.unpin(shares)

    def pin(self, attempt: str) -> dict[int, HeldShare]:
        """Hold the slots of all sealed shares of ``attempt``, until ``unpin`` is called with what this returns."""
        return self._book.pin(attempt)

    def unpin(self, shares: Mapping[int, HeldShare]) -> None:
        """Let go of what ``pin`` returned."""
        for share in shares.values():
            self.arena.release(share.slot)

    # ---- reading

    def serve(
        self, pack: str, byte_start: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]
    ) -> list[memoryview] | None:
        """Ranges of a pack of the committed attempt as they lie in memory, or None if it is not held here.

        Not verified: whoever reads holds the checksums. Views of the arena: send them before the next commit, or pin.
        """
        attempt, rank = parse_node_pack(pack)
        share = self._book.readable(attempt).get(rank)
        if share is None:
            return None
        view = self.arena.view(share.slot).data.toreadonly()
        return [view[start : start + size] for start, size in zip(byte_start.tolist(), nbytes.tolist())]

    def source(self, attempt: str, peers: Sequence[tuple[str, Serve]] = (), twin: Copy | None = None) -> VerifiedSource:
        """Where the chunks of a committed attempt are read from: own memory, then ``peers`` (name and ``serve``) in
        order, then ``twin``, a durable copy (see ``TwinCopy``). For tables whose packs are those of the node tier."""
        if attempt != self._book.committed:
            raise SnapshotError("only a committed attempt can be read", f"attempt {attempt}")
        copies: list[Copy] = [ServedCopy("own node", self.serve, mapped=True)]
        copies += [ServedCopy(name, serve) for name, serve in peers]
        return VerifiedSource([*copies, twin] if twin is not None else copies)

    def locate(self, pack: str) -> SlotRef | None:
        """The slot in which a pack of the committed attempt lies on this node: a rank maps it and copies straight from
        it. Byte ranges of the chunk table are those of the slot."""
        attempt, rank = parse_node_pack(pack)
        share = self._book.readable(attempt).get(rank)
        return None if share is None else share.slot

    # ---- durable storage

    def upload(
        self,
        attempt: str,
        store: BlobStore,
        prefix: str,
        *,
        node: int,
        ranks: Sequence[int] | None = None,
        previous: SnapshotRef | None = None,
        max_depth: int = MAX_DEPTH,
        weights_only: bool = False,
    ) -> list[FileRecord]:
        """Write the shares of ``ranks`` (all that are held) under ``prefix`` (see ``attempt_prefix``), as the
        ``node``-th of the stores that do. Chunks that ``previous`` holds are referred to,
        unless it is ``max_depth`` deep already. With ``weights_only`` only tensors of modules are written.

        The slots are held meanwhile, whatever is committed. Durable on return. Raises StorageError if a write failed,
        SnapshotError if a share is not held here.
        """
        with self.pinned(attempt) as shares:
            chosen = sorted(shares) if ranks is None else list(ranks)
            if missing := [rank for rank in chosen if rank not in shares]:
                raise SnapshotError(f"the shares of ranks {missing} are not held on this node", f"attempt {attempt}")
            if not chosen:
                return []
            with self._lock:
                kept = {rank: share.header for rank, share in shares.items()}
                self._uploading = dict([*self._uploading.items(), (attempt, kept)][-KEPT_UPLOADS:])
            before = None
            if previous is not None and previous.depth < max_depth:
                before = self._table_of(store, previous)
            bytes_of = {rank: self.arena.view(shares[rank].slot) for rank in chosen}
            tables = {rank: shares[rank].header.table for rank in chosen}
            if weights_only:
                tables = {rank: weights_table(table, shares[rank].header.objects) for rank, table in tables.items()}
            shares_of = {rank: (tables[rank], bytes_of[rank]) for rank in chosen}
            records, table = upload_shares(shares_of, store, prefix, node=node, previous=before, nice=self.nice)
        with self._lock:
            self._uploaded = dict([*self._uploaded.items(), (prefix, table)][-KEPT_UPLOADS:])
        return records

    def _table_of(self, store: BlobStore, ref: SnapshotRef) -> ChunkTable | None:
        """The chunk table of a committed snapshot: what this node wrote of it, or all of it from the store."""
        if (table := self._uploaded.get(ref.prefix)) is not None:
            return table
        try:
            return SnapshotCatalog(store, ref.run).open(ref).table
        except CorruptSnapshot:
            return None

    def close(self) -> None:
        """Give all memory back and remove the files."""
        self.threads.shutdown(wait=True)
        self._book.clear()
        self.arena.close()

    # ---- bookkeeping

    def _headers(self, attempt: str) -> dict[int, ShareHeader]:
        held = {rank: share.header for rank, share in self._book.shares(attempt).items()}
        return self._uploading.get(attempt, {}) | held

    def _check_rows(self, table: ChunkTable, view: npt.NDArray[np.uint8]) -> None:
        found = digest_chunks(view, table.byte_start, table.nbytes, table.algorithm, self.threads)
        wrong = (found != table.digest).any(axis=1)
        if wrong.any():
            raise CorruptSnapshot(f"damaged on the way: {table.describe(int(np.flatnonzero(wrong)[0]))}")
