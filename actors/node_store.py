"""The store of one node: owns the arenas, hashes, replicates and uploads. Outlives the ranks; imports no torch.

A thin shell around ``elastic.snapshot.node_tier``: it moves bytes between nodes and tells the controller what came of
it. Whatever belongs to an older generation than the store has seen is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import ray

import elastic
from actors.death import Coroner
from actors.fence import Fenced
from actors.last_words import LastWords
from actors.names import NAMESPACE, store_name
from actors.node_watch import OWN, NodeWatch, Stacks, end_processes
from actors.outbox import Outbox
from actors.progress_page import PageWriter
from actors.restores import Opened, Restores
from actors.share_socket import Ranges, ShareAddress, ShareServer, fetch
from actors.terminate import on_sigterm
from elastic.clock import now, wall
from elastic.errors import ElasticError, SnapshotError, StorageError
from elastic.observe.prints import PREFIX, prints_directory, read_lines
from elastic.progress import Progress
from elastic.protocol.adoption import AttemptFacts, StoreFacts
from elastic.protocol.hangs import NodePulse
from elastic.protocol.shares import ShareReport, SlotRef, StagedShare
from elastic.protocol.tiers import RestoreOrder
from elastic.retention import parse
from elastic.snapshot.arena import sweep_arenas
from elastic.snapshot.collect import collect
from elastic.snapshot.committer import commit_remote
from elastic.snapshot.drain_threads import DRAIN_NICE
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.made_with import installed, of_objects
from elastic.snapshot.manifest import FileRecord, SnapshotRef
from elastic.snapshot.node_fetch import Fetched
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.object_names import attempt_prefix, node_pack, parse_node_pack
from elastic.snapshot.weights_only import weights_index, weights_run
from elastic.storage.blob_store import open_store
from elastic.storage.paced_blobs import Pace, PacedBlobs

log = logging.getLogger("elastic.store")


END_S = 2.0
"""How long a rank that the controller told to end may take before its store ends it."""
ARENA_PREFIX = "elastic-"


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """What a store is told once."""

    run: str
    node: str
    arena_directory: str
    checksum: str
    storage: str
    max_in_flight: int = 1
    upload_bytes_per_s: float | None = None
    fence_timeout_s: float = 15.0


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """News of a store. ``kind``: sealed (report, places), failed (rank, reason) or terminating (it got SIGTERM)."""

    kind: str
    attempt: str = ""
    report: ShareReport | None = None
    places: tuple[str, ...] = ()
    rank: int = -1
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Upload:
    """One attempt on its way to durable storage. ``write_id`` tells our marker from another writer's."""

    attempt: str
    snapshot_id: str
    step: int
    write_id: str
    versions: Mapping[str, str]
    previous: SnapshotRef | None = None
    weights_only: bool = False

    def run_of(self, run: str) -> str:
        """The run whose snapshot it becomes, when ``run`` takes it."""
        return weights_run(run) if self.weights_only else run


def arena_path(directory: str, run: str, node: str) -> str:
    """Where the arenas of a node lie; whoever acts out a node's death removes it."""
    return os.path.join(directory, f"{ARENA_PREFIX}{run}-{node[:12]}")


def _presence(index: SnapshotIndex) -> dict[str, bool]:
    """Which kinds of state the snapshot holds. A gradient scaler is known by the counter that only it has."""
    return {
        "optimizer": bool(index.point.optimizer_steps),
        "scheduler": bool(index.point.scheduler_steps),
        "scaler": any(b'"_growth_tracker"' in tree for tree in index.objects.trees.values()),
        "rng": True,
    }


def _versions(index: SnapshotIndex, given: Mapping[str, str]) -> dict[str, str]:
    """What the snapshot is made with: what is installed here, what the state tells of itself, what the user named."""
    found = {**installed(), "ray": ray.__version__, **of_objects(index.objects.of(0))}
    return {**found, **{name: text for name, text in given.items() if text}}


def versions() -> dict[str, str]:
    """What must be alike on all nodes of a run."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "missing"
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch_version,
        "ray-elastic": elastic.__version__,
    }


class NodeStore(Fenced):
    """The actor."""

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        self.outbox = Outbox()
        path = arena_path(spec.arena_directory, spec.run, spec.node)
        # A store that was given up on may still be there, with its ranks: from now on this one speaks for the node.
        end_processes(path)
        sweep_arenas(spec.arena_directory, ARENA_PREFIX)  # of stores that were killed on this machine
        self.tier = NodeTier(path, algorithm=spec.checksum, max_in_flight=spec.max_in_flight, nice=DRAIN_NICE)
        self._pace = Pace(spec.upload_bytes_per_s) if spec.upload_bytes_per_s is not None else None
        self.restores = Restores(spec.run, spec.node, spec.storage, self.tier)
        self._shares = ShareServer(ray.util.get_node_ip_address(), self._held, self._served)
        PageWriter(path, OWN, Progress(), beats=False)
        self._watch = NodeWatch(spec.node, ray.util.get_node_ip_address(), path, spec.fence_timeout_s, self._leave)
        self._generation = 0
        self._read: dict[str, dict[str, bytes]] = {}
        """Of each run that this store has collected: see ``collect``."""
        self._opened: dict[str, AttemptFacts] = {}
        """Of attempts that are neither committed nor given up, and of the committed one; changed with the outbox."""
        self._news = threading.Lock()
        self._lock = threading.Lock()
        self._coroner = Coroner(path)
        on_sigterm(lambda: self.outbox.put(StoreEvent("terminating")))

    def versions(self) -> dict[str, str]:
        """See ``versions``."""
        return versions()

    def ping(self) -> bool:
        """Whoever answers is alive."""
        return True

    @ray.method(concurrency_group="watch")
    def pulse(self, generation: int, members: tuple[str, ...]) -> NodePulse:
        """What the ranks of ``generation`` on this node do; see NodeWatch. Being asked keeps the node in the run."""
        return self._watch.pulse(generation, members)

    @ray.method(concurrency_group="watch")
    def stacks(self, members: tuple[str, ...]) -> list[Stacks]:
        """The stacks of those of ``members`` that are on this node."""
        return self._watch.stacks(members)

    @ray.method(concurrency_group="watch")
    def end_rank(self, member: str) -> bool:
        """SIGKILL a rank on this node."""
        return self._watch.end(member)

    def _leave(self) -> None:
        """The controller cannot be reached, and the ranks here are killed: nothing of this node may act any more."""
        shutil.rmtree(self.tier.arena.directory, ignore_errors=True)
        os._exit(1)

    def poll(self, after: int, timeout_s: float) -> tuple[int, list[StoreEvent]]:
        """News; see Outbox.poll."""
        self._coroner.look()
        return self.outbox.poll(after, timeout_s)

    def examine(self, member: str) -> tuple[LastWords, bool]:
        """How a rank of this node died; see Coroner."""
        return self._coroner.examine(member)

    # --- making a snapshot ---------------------------------------------------------------------------------------

    def open_attempt(
        self,
        generation: int,
        attempt: str,
        share_bytes: Mapping[int, int],
        peer: str,
        replicas: int,
        purpose: str,
        stop: bool,
    ) -> dict[int, SlotRef] | str:
        """Slots for the shares of this node's ranks, or why there are none. ``peer`` is the node for replicas;
        ``purpose`` and ``stop`` are kept for a controller that has to go on with the round."""
        with self._lock:
            if generation < self._generation:
                return f"generation {generation} is over; the store has seen {self._generation}"
            if generation > self._generation:
                self._generation = generation
                self.tier.abandon_open()
        try:
            self.tier.reserve(max(share_bytes.values()), len(share_bytes), replicas)
            slots = self.tier.open_attempt(attempt, share_bytes)
        except ElasticError as error:
            return str(error)
        if slots is not None:
            with self._news:
                kept = {name: facts for name, facts in self._opened.items() if name == self.tier.committed}
                opened = AttemptFacts(purpose, generation, stop, dict(share_bytes), peer, slots)
                self._opened = {**kept, attempt: opened}
        return "no arena slot is free: earlier snapshots are still being read" if slots is None else slots

    def seal(self, staged: StagedShare, generation: int) -> None:
        """Hash a share, copy it to the peer, and tell the controller."""
        try:
            report = self.tier.seal(staged)
            started = now()
            places = (self.spec.node, *self._replicate(staged.attempt, staged.rank))
            report = replace(report, drain_s={**report.drain_s, "replicate": now() - started})
        except Exception as error:  # whatever went wrong, the controller must not wait for this share
            log.exception("sealing failed")
            self.refuse(staged.attempt, staged.rank, f"{type(error).__name__}: {error}")
        else:
            with self._news:
                if (facts := self._opened.get(staged.attempt)) is not None:
                    self._opened[staged.attempt] = replace(facts, sealed={**facts.sealed, staged.rank: places})
                self.outbox.put(StoreEvent("sealed", staged.attempt, report, places))

    def refuse(self, attempt: str, rank: int, reason: str) -> None:
        """A share will not come."""
        with self._news:
            if (facts := self._opened.get(attempt)) is not None:
                self._opened[attempt] = replace(facts, failed={**facts.failed, rank: reason})
            self.outbox.put(StoreEvent("failed", attempt, rank=rank, reason=reason))

    def account(self) -> tuple[StoreFacts, int]:
        """What a new controller has to know, and the number of the first event that is not in it."""
        with self._news:
            held = self.tier.reports()
            attempts = {}
            for name in {*held, *self._opened}:
                reports, world_size = held.get(name, ({}, 0))
                facts = self._opened.get(name, AttemptFacts())
                attempts[name] = replace(facts, reports=reports, world_size=world_size)
            return StoreFacts(self.spec.node, self.tier.committed or "", attempts), self.outbox.following

    def _replicate(self, attempt: str, rank: int) -> tuple[str, ...]:
        opened = self._opened.get(attempt)
        if opened is None or not opened.peer:
            return ()
        peer = opened.peer
        try:
            actor = ray.get_actor(store_name(self.spec.run, peer), namespace=NAMESPACE)
            ray.get(actor.fetch_share.remote(attempt, rank, self._shares.address))
        except (ray.exceptions.RayError, ValueError) as error:
            raise SnapshotError(f"the replica on node {peer} was not made: {error}", f"attempt {attempt}") from None
        return (peer,)

    def share_address(self) -> ShareAddress:
        """Where other nodes find the shares of this one, by the names of their packs: see ``share_socket``."""
        return self._shares.address

    def fetch_share(self, attempt: str, rank: int, address: ShareAddress) -> None:
        """Keep a replica of the share that a peer serves; checked on arrival."""
        self.tier.receive_share(attempt, rank, lambda place: fetch(address, node_pack(attempt, rank), place))

    @contextmanager
    def _held(self, pack: str) -> Iterator[tuple[bytes, memoryview]]:
        attempt, rank = parse_node_pack(pack)
        with self.tier.pinned(attempt):
            yield self.tier.export_share(attempt, rank)

    @contextmanager
    def _served(self, pack: str, byte_start: Ranges, nbytes: Ranges) -> Iterator[list[memoryview]]:
        with self.tier.pinned(parse_node_pack(pack)[0]):
            views = self.tier.serve(pack, byte_start, nbytes)
            if views is None:
                raise SnapshotError("the share is not held on this node", pack)
            yield views

    def commit(self, attempt: str) -> None:
        """The attempt is committed; the former one is given back when nobody reads it."""
        self.tier.commit(attempt)
        with self._news:
            self._opened = {name: facts for name, facts in self._opened.items() if name == attempt}

    def abandon(self, attempt: str) -> None:
        """Free what the attempt holds here."""
        self.tier.abandon(attempt)
        with self._news:
            if attempt != self.tier.committed:
                self._opened.pop(attempt, None)

    # --- reading -------------------------------------------------------------------------------------------------

    def headers(self, attempt: str, ranks: tuple[int, ...]) -> dict[int, bytes]:
        """Headers of shares held here, for whoever assembles the index."""
        return self.tier.headers(attempt, ranks)

    def locate(self, pack: str) -> SlotRef | None:
        """Where a pack lies in this node's memory."""
        return self.tier.locate(pack)

    def open_restore(self, generation: int, order: RestoreOrder, readers: int) -> Opened | ElasticError:
        """See Restores."""
        return self.restores.open(generation, order, readers)

    def announce(self, generation: int, reader: int, rows: np.ndarray[Any, Any], late: np.ndarray[Any, Any]) -> None:
        """What a rank of this node will ask for."""
        self.restores.of(generation).announce(reader, rows, late)

    def fetch(self, generation: int, reader: int, rows: np.ndarray[Any, Any]) -> Fetched | ElasticError:
        """Chunks, read once for all ranks of the node; where they lie, or why they cannot be had."""
        try:
            return self.restores.of(generation).fetch(reader, rows)
        except ElasticError as error:
            return error

    def give_back(self, generation: int, ticket: int) -> None:
        """A rank has copied what it was given."""
        with contextlib.suppress(StorageError):  # the restore is over, and its memory gone with it
            self.restores.of(generation).give_back(ticket)

    def leave(self, generation: int, reader: int) -> None:
        """A rank has restored what it wanted."""
        self.restores.leave(generation, reader)

    # --- the durable tier ----------------------------------------------------------------------------------------

    def upload(self, upload: Upload, ranks: tuple[int, ...], number: int) -> list[FileRecord]:
        """Write the packs of ``ranks`` and this node's chunk table, as the ``number``-th store that does."""
        run = upload.run_of(self.spec.run)
        prefix = attempt_prefix(run, upload.step, upload.snapshot_id, upload.attempt)
        store = open_store(self.spec.storage)
        if self._pace is not None:
            store = PacedBlobs(store, self._pace)
        return self.tier.upload(
            upload.attempt,
            store,
            prefix,
            node=number,
            ranks=ranks,
            previous=upload.previous,
            weights_only=upload.weights_only,
        )

    def commit_durable(
        self,
        upload: Upload,
        places: Mapping[int, str],
        reports: tuple[ShareReport, ...],
        files: tuple[FileRecord, ...],
        metrics: Mapping[str, float],
    ) -> SnapshotRef:
        """Manifest, then marker, for shares that all stores have uploaded. Run by one store for all, so that tables
        never pass through the controller. May be called again with the same arguments after CommitUnknown."""
        elsewhere: dict[str, list[int]] = {}
        for rank, node in places.items():
            if node != self.spec.node:
                elsewhere.setdefault(node, []).append(rank)
        headers: dict[int, bytes] = {}
        for node, ranks in elsewhere.items():
            actor = ray.get_actor(store_name(self.spec.run, node), namespace=NAMESPACE)
            headers |= ray.get(actor.headers.remote(upload.attempt, tuple(ranks)))
        index = self.tier.index(upload.attempt, headers, upload.snapshot_id)
        if upload.weights_only:
            index = weights_index(index)
        return commit_remote(
            open_store(self.spec.storage),
            upload.run_of(self.spec.run),
            index,
            reports,
            files,
            versions=_versions(index, upload.versions),
            has={} if upload.weights_only else _presence(index),
            write_id=upload.write_id,
            committed_at_s=wall(),
            previous=upload.previous,
            writers=tuple(sorted(set(places.values()))),
            metrics=metrics,
        )

    def retain(self, run: str, keep: int | str, in_flight: tuple[str, ...]) -> list[str]:
        """Let go of the durable snapshots of ``run`` that the rules ``keep`` do not keep and sweep, but for the
        directories of what is on its way and refers to them. Returns the names of what was deleted."""
        report = collect(
            open_store(self.spec.storage),
            run,
            parse(keep),
            now_s=wall(),
            in_flight=in_flight,
            generation=self._generation,
            read_before=self._read.setdefault(run, {}),
        )
        return list(report.delete)

    def read_prints(self, cursor: Mapping[str, int]) -> tuple[list[str], dict[str, int]]:
        """What the ranks of this node printed after ``cursor``; see ``read_lines``. Anybody may ask."""
        return read_lines(prints_directory(self.spec.run, self.spec.node), cursor)

    def close(self) -> None:
        """End what is left of the ranks, leave what they printed in storage, and give all memory back; the actor can be
        killed afterwards."""
        end_processes(str(self.tier.arena.directory), spare=os.getpid(), patience_s=END_S)
        self.restores.close()
        self._shares.close()
        self.tier.close()
        directory = prints_directory(self.spec.run, self.spec.node)
        store, at = open_store(self.spec.storage), int(wall())
        try:
            for path in sorted(directory.glob("*.jsonl")):
                store.put(f"{self.spec.run}/{PREFIX}{at}-{self.spec.node[:12]}-{path.name}", path.read_bytes())
        except (ElasticError, OSError) as error:
            log.warning("what the ranks printed was not stored: %s", error)
        shutil.rmtree(directory, ignore_errors=True)


NodeStoreActor = ray.remote(num_cpus=0, max_concurrency=32, max_restarts=0, concurrency_groups={"watch": 3})(NodeStore)
