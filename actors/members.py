"""The actors of a run as the controller holds them: starts stores and ranks, watches them, kills them.

Turns what Ray says of processes into events of the lifecycle; decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError

from actors.calls import answer, first_line, settled
from actors.cluster_view import on_node
from actors.death import Death, evidence_of, words_path
from actors.fence import Ordered
from actors.heartbeats import Heartbeats, phase_limits
from actors.last_words import LastWords
from actors.names import NAMESPACE, member_name, store_name
from actors.node_store import NodeStoreActor, StoreEvent, StoreSpec, arena_path, versions
from actors.rank import RankActor
from actors.rank_orders import RankEvent, RankSpec
from actors.raylets import Raylet, refuses
from actors.watch import answers, kill, watch
from elastic.clock import now
from elastic.errors import ClusterError, ElasticError
from elastic.protocol import run_lifecycle as life
from elastic.protocol.classification import classify
from elastic.protocol.run_lifecycle import RunState

log = logging.getLogger("elastic.members")

START_TIMEOUT_S = 120.0
"""A rank that has not started by then lost its place to others; it is placed again."""
CLOSE_TIMEOUT_S = 10.0


class Members:
    """``post`` takes lifecycle events; ``on_rank`` and ``on_store`` the news of ranks and stores; ``written`` says up
    to which generation and step the journal has rows of metrics."""

    def __init__(
        self,
        spec: Any,
        post: Callable[[Any], None],
        on_rank: Callable[[str, RankEvent], None],
        on_store: Callable[[str, StoreEvent], None],
        heartbeats: Heartbeats,
        written: Callable[[], tuple[int, int]],
    ) -> None:
        self._spec, self._post, self._on_rank, self._on_store = spec, post, on_rank, on_store
        self._heartbeats, self._written = heartbeats, written
        self.stores: dict[str, Any] = {}
        self.ranks: dict[str, Any] = {}
        self.raylets: Mapping[str, Raylet] = {}
        """Of the living nodes, as Ray knows them."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._nodes: dict[str, str] = {}
        self.epoch = 0
        """The number of this controller: see ``fence``."""

    # --- stores --------------------------------------------------------------------------------------------------

    def start_store(self, node: str) -> None:
        """One store on ``node``; answers with StoreReady, NodeRefused or StoreLost."""
        self._spawn(f"store {node}", self._run_store(node))

    async def _run_store(self, node: str) -> None:
        run = self._spec.run
        snapshots = run.snapshots
        spec = StoreSpec(
            run.name,
            node,
            snapshots.arena_directory,
            snapshots.checksum,
            run.storage_path,
            snapshots.max_uploads_in_flight + (snapshots.weights_every is not None),
            snapshots.upload_bytes_per_s,
            run.failures.fence_timeout_s,
        )
        try:
            actor = NodeStoreActor.options(
                name=store_name(run.name, node),
                namespace=NAMESPACE,
                lifetime="detached",
                scheduling_strategy=on_node(node),
                runtime_env=self._spec.runtime_env,
                get_if_exists=True,
            ).remote(spec)
            theirs = await asyncio.wait_for(answer(actor.versions.remote()), START_TIMEOUT_S)
        except (RayError, asyncio.TimeoutError, ValueError) as error:
            self._post(life.StoreLost(now(), node, f"its store did not start: {first_line(error)}"))
            return
        ours = versions()
        if unlike := [f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if theirs[name] != ours[name]]:
            kill(actor)
            cure = "install the same versions on every node"
            self._post(life.NodeRefused(now(), node, ClusterError(f"node {node[:12]} has {', '.join(unlike)}", cure)))
            return
        self.stores[node] = Ordered(actor, self.epoch)
        self._post(life.StoreReady(now(), node))
        await self._watch_store(node, 0)

    async def _watch_store(self, node: str, after: int) -> None:
        actor = self.stores[node]
        why, silent_s = await self._store_lost(node, actor, after)
        self.stores.pop(node, None)
        kill(actor)
        if silent_s:
            self._cut_off(node)
        self._post(life.StoreLost(now(), node, f"the store of node {node[:12]} {why}", silent_s))

    async def _store_lost(self, node: str, actor: Any, after: int) -> tuple[str, float]:
        """Deliver the store's news until it dies or is silent for too long: why, and the seconds of its silence."""
        probe_s = self._spec.run.failures.probe_timeout_s
        watching = asyncio.ensure_future(
            watch(
                actor,
                lambda event: self._on_store(node, event),
                actor.ping.remote,
                probe_s,
                lambda: self._dead(node),
                after,
            )
        )
        following = asyncio.ensure_future(self._heartbeats.follow(node, actor))
        try:
            await asyncio.wait({watching, following}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                return f"is gone: {watching.result()}", 0.0
            silent_s = following.result()
            return f"has been silent for {silent_s:.1f} s", silent_s
        finally:
            watching.cancel()
            following.cancel()

    def _cut_off(self, node: str) -> None:
        """Nobody resets the connections to a silent node: ranks elsewhere that wait for its ranks break their own."""
        address = self._heartbeats.address(node)
        for member, actor in self.ranks.items():
            if address and address != self._heartbeats.address(self._nodes[member]):
                actor.cut.remote(address)

    async def stacks_of(self, member: str) -> str:
        """A rank's own word of its stacks; empty if it does not answer."""
        try:
            found: str = await asyncio.wait_for(
                answer(self.ranks[member].stacks.remote()), self._spec.run.failures.probe_timeout_s
            )
        except (RayError, KeyError, asyncio.TimeoutError):
            return ""
        return found

    # --- ranks ---------------------------------------------------------------------------------------------------

    def start_member(self, member: str, node: str) -> None:
        """One rank process on ``node``; answers with MemberReady, EntryFailed or MemberLost."""
        self._nodes[member] = node
        self._spawn(f"rank {member}", self._run_member(member, node))

    async def _run_member(self, member: str, node: str) -> None:
        run, scaling = self._spec.run, self._spec.scaling
        resources = scaling.resources
        spec = RankSpec(
            run=run.name,
            member=member,
            node=node,
            entry=self._spec.entry,
            config=self._spec.config,
            storage=run.storage_path,
            seed=run.seed,
            rng=run.snapshots.rng,
            rng_on_resize=run.snapshots.rng_on_resize,
            words=words_path(arena_path(run.snapshots.arena_directory, run.name, node), member),
            pages=arena_path(run.snapshots.arena_directory, run.name, node),
            phases=phase_limits(run.failures),
            use_gpu=scaling.use_gpu,
            versions=self._spec.versions,
        )
        actor: Any = None
        try:
            actor = RankActor.options(
                name=member_name(run.name, member),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                resources={name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")},
                scheduling_strategy=on_node(node),
                runtime_env=self._spec.runtime_env,
                get_if_exists=True,
            ).remote(spec)
            self.ranks[member] = Ordered(actor, self.epoch)
            await asyncio.wait_for(answer(self.ranks[member].warm_up.remote()), START_TIMEOUT_S)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            failure = cause if isinstance(cause, ElasticError) else None
            text = f"{type(cause).__name__}: {cause}"
            self._post(life.EntryFailed(now(), member, text, str(error), failure))
            return
        except (RayError, asyncio.TimeoutError, ValueError) as error:
            if actor is not None:
                kill(actor)
            self.ranks.pop(member, None)
            self._post(life.MemberLost(now(), member, f"it did not start: {first_line(error)}"))
            return
        self._post(life.MemberReady(now(), member))
        await self._watch_rank(member, 0)

    async def _watch_rank(self, member: str, after: int) -> None:
        actor = self.ranks[member]
        probe_s = self._spec.run.failures.probe_timeout_s
        node = self._nodes[member]
        death = await watch(
            actor,
            lambda event: self._on_rank(member, event),
            actor.status.remote,
            probe_s,
            lambda: self._dead(node),
            after,
            lambda: (self._written(),),
        )
        self.ranks.pop(member, None)
        kill(actor)
        await self._lost(member, death)

    # --- what a predecessor has started --------------------------------------------------------------------------

    def adopt_store(self, node: str, actor: Any, after: int) -> None:
        """A store that answers; its news from number ``after`` on are news."""
        self.stores[node] = actor
        self._spawn(f"store {node}", self._watch_store(node, after))

    def adopt_member(self, member: str, node: str, actor: Any, after: int) -> None:
        """A rank that is ready or trains; its news from number ``after`` on are news."""
        self._nodes[member], self.ranks[member] = node, actor
        self._spawn(f"rank {member}", self._watch_rank(member, after))

    async def _lost(self, member: str, death: Death) -> None:
        """A rank is gone. Is its node? Whoever decides where to restore from must know, so the store is asked first,
        and then how the rank died."""
        node = self._nodes[member]
        if not await self._store_answers(node):
            return
        words, oom_killed = LastWords(), False
        with contextlib.suppress(RayError, KeyError, asyncio.TimeoutError):
            asked = answer(self.stores[node].examine.remote(member))
            words, oom_killed = await asyncio.wait_for(asked, self._spec.run.failures.probe_timeout_s)
        failure_class, why = classify(evidence_of(death, words, oom_killed))
        self._post(life.MemberLost(now(), member, why, failure_class=failure_class, traceback=words.traceback))

    async def _store_answers(self, node: str) -> bool:
        """Whether the store of ``node`` answers; where it does not, the node is lost with all its ranks."""
        actor = self.stores.get(node)
        if actor is None:
            return True
        if await answers(actor.ping.remote, self._spec.run.failures.probe_timeout_s, self._dead(node)):
            return True
        if self.stores.pop(node, None) is not None:
            self._drop(f"store {node}")
            kill(actor)
            self._post(life.StoreLost(now(), node, f"the store of node {node[:12]} does not answer"))
        return False

    async def _dead(self, node: str) -> bool:
        """Whether the node is found to be dead, by its raylet's port."""
        raylet = self.raylets.get(node)
        return raylet is not None and await refuses(raylet, self._spec.run.failures.probe_timeout_s)

    def interrupt(self, names: Iterable[str], generation: int) -> None:
        """Ask ranks to leave the train function."""
        for name in names:
            if name in self.ranks:
                self.ranks[name].interrupt.remote(generation)

    def kill(self, member: str) -> None:
        """End a rank's process; it is not heard any more."""
        actor = self.ranks.pop(member, None)
        if task := self._tasks.pop(f"rank {member}", None):
            task.cancel()
        if actor is not None:
            if store := self.stores.get(self._nodes[member]):
                store.end_rank.remote(member)
            kill(actor)

    def probe(self, names: Iterable[str]) -> None:
        """Find out which of these ranks, and which stores of their nodes, still answer; the others are lost."""
        for name in names:
            if name in self.ranks:
                self._spawn(f"probe {name}", self._probe(name))

    async def all_answer(self, names: Iterable[str]) -> bool:
        """Whether all of these ranks answer a probe; those that do not are lost."""
        wanted = list(names)
        await asyncio.gather(*(self._probe(name) for name in wanted))
        return all(name in self.ranks for name in wanted)

    async def _probe(self, name: str) -> None:
        actor = self.ranks.get(name)
        if actor is None:
            return
        timeout = self._spec.run.failures.probe_timeout_s
        rank_lives, store_lives = await asyncio.gather(
            answers(actor.status.remote, timeout, self._dead(self._nodes[name])),
            self._store_answers(self._nodes[name]),
        )
        if store_lives and not rank_lives and self.ranks.pop(name, None) is not None:
            self._drop(f"rank {name}")
            kill(actor)
            self._post(life.MemberLost(now(), name, "it does not answer"))

    def share_bytes(self, state: RunState) -> dict[int, int]:
        """Bytes of each rank's share, as the ranks published them last."""
        return dict(state.entered)

    async def close(self) -> None:
        """End everything: ranks, then stores after they have removed their arenas."""
        for task in self._tasks.values():
            if task is not asyncio.current_task():
                task.cancel()
        for actor in self.ranks.values():
            kill(actor)
        await settled((store.close.remote() for store in self.stores.values()), CLOSE_TIMEOUT_S)
        for store in self.stores.values():
            kill(store)
        self.ranks.clear()
        self.stores.clear()

    def _drop(self, task: str) -> None:
        if found := self._tasks.pop(task, None):
            found.cancel()

    def _spawn(self, name: str, work: Any) -> None:
        self._drop(name)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._finished(name, done))

    def _finished(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        if not task.cancelled() and task.exception() is not None:
            log.error("watching %s failed", name, exc_info=task.exception())
