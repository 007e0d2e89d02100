"""Performs the commands of a snapshot round: talks to stores and ranks, and feeds what they say back to the machine.

One round at a time. Whatever a round says after it ended is dropped here by its attempt's name.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from ray.exceptions import RayError

from actors.calls import answer, first_line, settled
from actors.node_store import StoreEvent
from actors.rank_orders import LiveOrder
from elastic.clock import now
from elastic.gate import Order
from elastic.protocol import snapshot_round as machine
from elastic.protocol.machine import Machine
from elastic.protocol.snapshot_round import RoundState

log = logging.getLogger("elastic.rounds")

LEAD_S = 0.03
"""A boundary is named so far ahead that the proposal reaches every rank before it."""
CALL_TIMEOUT_S = 30.0
COMMIT_TIMEOUT_S = 2.0


async def commit_everywhere(stores: Mapping[str, Any], attempt: str) -> None:
    """Every store has heard of the commit, or had its time to. One that does not answer is lost, and its replica
    serves."""
    for came in await settled((store.commit.remote(attempt) for store in stores.values()), COMMIT_TIMEOUT_S):
        if isinstance(came, RayError):
            log.warning("a store was not told of the commit of %s: %s", attempt, first_line(came))


class RoundShell:
    """``on_end`` gets the final state of each round, ``before_commit`` is awaited before stores are told to commit."""

    def __init__(
        self,
        on_end: Callable[[RoundState], None],
        before_commit: Callable[[RoundState], Awaitable[None]],
    ) -> None:
        self._on_end, self._before_commit = on_end, before_commit
        self._machine: Machine[RoundState] | None = None
        self._ranks: Mapping[int, Any] = {}
        self._stores: Mapping[str, Any] = {}
        self._held_step: int | None = None
        self._wanted_step = 0
        self._step_s = 0.0
        self._committed_step = 0
        self._synchronous = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.started_at = 0.0

    def release(self, attempt: str, generation: int) -> None:
        """Training goes on from a boundary at which it waited for ``attempt``."""
        for rank in self._ranks.values():
            rank.release.remote(generation, attempt)

    @property
    def open(self) -> bool:
        """Whether a round is in progress."""
        return self._machine is not None and self._machine.state.phase not in (machine.COMMITTED, machine.ABANDONED)

    def start(
        self,
        *,
        purpose: str,
        stop: bool,
        generation: int,
        ranks: Mapping[int, Any],
        nodes: Mapping[int, str],
        stores: Mapping[str, Any],
        peers: Mapping[str, str],
        share_bytes: Mapping[int, int],
        held_step: int | None,
        committed_step: int,
        wanted_step: int,
        step_s: float,
        synchronous: bool = False,
    ) -> None:
        """Open a round. ``held_step``: all ranks wait at this boundary. ``wanted_step``: not before this one."""
        attempt = f"g{generation:06d}-{secrets.token_hex(4)}"
        self._ranks, self._stores = ranks, stores
        self._held_step, self._wanted_step, self._step_s = held_step, wanted_step, step_s
        self._committed_step, self._synchronous = committed_step, synchronous
        self.started_at = now()
        state, commands = machine.begin(
            RoundState(
                attempt,
                purpose,
                generation,
                stop,
                nodes,
                peers,
                share_bytes,
                step=held_step if held_step is not None else -1,
            )
        )
        self._machine = Machine("snapshot round", machine.TABLE, state)
        self._perform(commands)

    def know(self, ranks: Mapping[int, Any], stores: Mapping[str, Any]) -> None:
        """The ranks and stores of a generation that a predecessor began."""
        self._ranks, self._stores = ranks, stores

    def resume(self, state: RoundState, sealed: Iterable[machine.ShareSealed]) -> None:
        """Go on with a round of a predecessor whose ranks were told to stage: tell all of them, and hear what was
        sealed meanwhile."""
        self._held_step, self.started_at = state.step, now()
        self._machine = Machine("snapshot round", machine.TABLE, state)
        if state.purpose == machine.LIVE:
            self._perform(tuple(machine.StageLive(rank, state.attempt, state.slots[rank]) for rank in state.nodes))
        else:
            self._perform((machine.Confirm(state.attempt, state.step),))
        for event in sealed:
            if self.open:
                self._feed(event)

    def cancel(self, reason: str) -> None:
        """Give up on the open round."""
        if self.open:
            self._feed(machine.RoundCancelled(reason))

    def end_reached(self, step: int) -> None:
        """All ranks stand at their last boundary."""
        if self.open:
            self._feed(machine.EndReached(step))

    def store_said(self, event: StoreEvent) -> None:
        """News of a store about a share."""
        if self._machine is None or self._machine.state.attempt != event.attempt:
            return
        if event.kind == "sealed" and event.report is not None:
            self._feed(machine.ShareSealed(event.report, event.places))
        else:
            self._feed(machine.ShareFailed(event.rank, event.reason))

    # --- performing ----------------------------------------------------------------------------------------------

    def _feed(self, event: Any) -> None:
        assert self._machine is not None
        self._perform(self._machine.handle(event))

    def _perform(self, commands: tuple[Any, ...]) -> None:
        assert self._machine is not None
        state = self._machine.state
        if any(isinstance(command, machine.CommitNodeTier) for command in commands):
            self._spawn(self._commit(state, commands))
            return
        for command in commands:
            self._do(state, command)

    async def _commit(self, state: RoundState, commands: tuple[Any, ...]) -> None:
        """Journal, then the stores, and only when they have answered the run hears of it: whoever is told to restore
        the snapshot finds it readable."""
        await self._before_commit(state)
        for command in commands:
            if isinstance(command, machine.CommitNodeTier):
                await commit_everywhere(self._stores, command.attempt)
            else:
                self._do(state, command)

    def _do(self, state: RoundState, command: Any) -> None:
        if isinstance(command, machine.OpenSlots):
            self._spawn(self._open_slots(state, command))
        elif isinstance(command, machine.NameBoundary):
            self._spawn(self._name_boundary(state, command))
        elif isinstance(command, machine.Propose):
            self._spawn(self._propose(state, command))
        elif isinstance(command, machine.StageLive):
            live = LiveOrder(command.attempt, command.slot, command.rank, len(state.nodes))
            if command.rank in self._ranks:  # else it just died, and the news is in the queue
                self._ranks[command.rank].salvage.remote(state.generation, live)
        elif isinstance(command, machine.Confirm):
            for rank in self._ranks.values():
                rank.confirm.remote(state.generation, command.attempt, command.step)
        elif isinstance(command, machine.ReleaseRanks):
            for rank in self._ranks.values():
                rank.release.remote(state.generation, command.attempt)
        elif isinstance(command, machine.AbandonShares):
            for store in self._stores.values():
                store.abandon.remote(command.attempt)
        elif isinstance(command, machine.RoundEnded):
            self._on_end(command.state)

    def _still(self, state: RoundState) -> bool:
        return self._machine is not None and self._machine.state.attempt == state.attempt and self.open

    async def _open_slots(self, state: RoundState, command: machine.OpenSlots) -> None:
        replicas = sum(state.peers.get(node) == command.node for node in state.nodes.values())
        try:
            slots = await asyncio.wait_for(
                answer(
                    self._stores[command.node].open_attempt.remote(
                        state.generation,
                        command.attempt,
                        dict(command.share_bytes),
                        state.peers.get(command.node, ""),
                        replicas,
                        state.purpose,
                        state.stop,
                    )
                ),
                CALL_TIMEOUT_S,
            )
        except (RayError, asyncio.TimeoutError, KeyError) as error:
            slots = f"its store does not answer: {type(error).__name__}"
        if self._still(state):
            if isinstance(slots, str):
                self._feed(machine.SlotsRefused(command.node, slots))
            else:
                self._feed(machine.SlotsOpened(command.node, slots))

    async def _name_boundary(self, state: RoundState, command: machine.NameBoundary) -> None:
        if self._held_step is not None:
            step = self._held_step
        else:
            reached = await asyncio.gather(*(self._step_of(rank) for rank in self._ranks.values()))
            lead = 1 + math.ceil(LEAD_S / self._step_s) if self._step_s > 0 else 2
            step = max(command.at_least, self._wanted_step, max(reached, default=-1) + min(lead, 1000))
        if self._still(state):
            self._feed(machine.BoundaryNamed(step))

    async def _step_of(self, rank: Any) -> int:
        try:
            _, step, _ = await asyncio.wait_for(answer(rank.status.remote()), CALL_TIMEOUT_S)
            return int(step)
        except (RayError, asyncio.TimeoutError):
            return -1

    async def _propose(self, state: RoundState, command: machine.Propose) -> None:
        held = self._held_step is not None
        order = Order(
            command.attempt,
            command.step,
            command.slot,
            command.stop,
            committed_step=self._committed_step,
            synchronous=self._synchronous,
            held=held,
        )
        try:
            accepted, reached = await asyncio.wait_for(
                answer(self._ranks[command.rank].propose.remote(state.generation, order)), CALL_TIMEOUT_S
            )
        except (RayError, asyncio.TimeoutError, KeyError) as error:
            if self._still(state):
                self._feed(machine.ShareFailed(command.rank, f"the rank does not answer: {type(error).__name__}"))
            return
        if self._still(state):
            if accepted:
                self._feed(machine.Accepted(command.rank, command.step))
            else:
                self._feed(machine.Passed(command.rank, command.step, reached))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a step of the snapshot round failed", exc_info=task.exception())
            self.cancel(f"internal error: {task.exception()}")
