"""A made-up cluster around the pure machines: nodes, stores, ranks, rounds and uploads in virtual time, from one seed.

Everything that the actors do for the machines is done here in a few lines, with messages that are late, processes that
die at any moment and users who ask for anything at any time. ``Run.play`` goes on until nothing is left to happen and
checks what must hold after every event; the first thing that does not raises Broken with the seed and the story.
"""

from __future__ import annotations

import heapq
from typing import Any

from support.made_up_failover import Failover
from support.made_up_world import Broken, Killed, Trouble

from elastic.errors import InternalError
from elastic.protocol import run_lifecycle as life
from elastic.protocol import snapshot_round as rounds
from elastic.protocol.run_state import RunState

LONGEST_S = 4000.0
MOST_EVENTS = 6000

__all__ = ["Broken", "Run", "Trouble"]


class Run(Failover):
    """One history, from beginning to end."""

    def play(self) -> Run:
        """Until the run has ended or nothing is left to happen. Raises Broken."""
        self._plan_trouble()
        self.later(0.0, self._view)
        self.later(0.0, self._measure)
        while self.heap and self.ended is None:
            self.now, _, act, args = heapq.heappop(self.heap)
            if self.now > LONGEST_S:
                self.broken(f"the run goes on for ever, in phase {self.machine.state.phase}")
            try:
                act(*args)
            except Killed:
                self._controller_dies()
        if self.ended is None:
            self.broken(f"nothing is left to happen in phase {self.machine.state.phase}")
        return self

    # --- the controller ----------------------------------------------------------------------------------------

    def post(self, event: Any) -> None:
        """Queue an event: handled in the order of posting, sometimes late."""
        if self.down:
            self.later(1.0, self.post, event)  # whoever has something to say says it again
            return
        self.queue_until = max(self.queue_until, self.now + (self.latency() if self.random.random() < 0.2 else 0.0))
        self.soon(self.queue_until - self.now, self._handle, event)

    def _handle(self, event: Any) -> None:
        if self.ended is not None:
            return
        self.events += 1
        if self.events > MOST_EVENTS:
            self.broken("too many events: the run turns in circles")
        before = self.machine.state
        if isinstance(event, (life.NodeCommitted, life.RoundAbandoned)):
            self.round_at["told"] = True
        try:
            commands = self.machine.handle(event)
        except (InternalError, KeyError, IndexError, ValueError, TypeError, AssertionError) as error:
            self.broken(f"{type(error).__name__}: {error}")
        self._check(before, event, commands)
        self.point("before the decision is in the journal")
        asked = isinstance(event, (life.ResizeAsked, life.StopAsked))
        begun = any(isinstance(command, life.BeginGeneration) for command in commands)
        if asked or begun or (self.machine.state.phase == life.GATHERING and commands):
            self.flush()
        self._carry_out(commands)

    def _carry_out(self, commands: tuple[Any, ...]) -> None:
        for command in commands:
            self.point(f"before {type(command).__name__}")
            self._perform(command)
            self.point(f"after {type(command).__name__}")
        self._arm()

    def _arm(self) -> None:
        deadline = self.machine.state.deadline
        if deadline is not None and deadline != self.tick_at:
            self.tick_at = deadline
            self.soon(max(0.0, deadline - self.now), self._tick, deadline)

    def _tick(self, deadline: float) -> None:
        if self.machine.state.deadline == deadline and self.ended is None:
            self.tick_at = None
            self._handle(life.Tick(self.now))
            after = self.machine.state.deadline
            if self.ended is None and after is not None and after <= self.now:
                self.broken(f"a tick leaves a deadline that has passed: {after} at {self.now}")

    def _perform(self, command: Any) -> None:
        name = type(command).__name__
        self.reached.add(name)
        if isinstance(command, life.StartStore):
            self.soon(self.latency(), self._store_started, command.node)
        elif isinstance(command, life.StartMember):
            self.starting[command.member] = command.node
            self.soon(self.latency() + 0.3 * self.slow * self.random.random(), self._started, command)
        elif isinstance(command, life.KillMember):
            self._kill_member(command.member)
        elif isinstance(command, life.BeginGeneration):
            self._begin(command)
        elif isinstance(command, life.Interrupt):
            for member in command.members:
                if rank := self.controller_ranks.get(member):
                    self.tell(rank, self._interrupt, rank, command.generation)
        elif isinstance(command, life.Probe):
            for member in command.members:
                self.soon(1.0, self._probe, member)
        elif isinstance(command, life.StartRound):
            self._start_round(command)
        elif isinstance(command, life.StartSalvage):
            self._start_salvage(command)
        elif isinstance(command, life.CancelRound):
            if self._round_open():
                self._feed(rounds.RoundCancelled(command.reason))
        elif isinstance(command, life.EndRoundBeyond):
            if self._round_open():
                self._feed(rounds.EndReached(command.step))
        elif isinstance(command, life.CloseIncident):
            self._incident(command.incident)
        elif isinstance(command, life.CloseNotice):
            self.evacuations.append(command.evacuation)
        elif isinstance(command, life.MakeDurable):
            if not self.finishing:
                self.finishing = True
                self.soon(0.0, self._make_durable, 0)
        elif isinstance(command, life.EndRun):
            self._end(command)

    def _end(self, command: life.EndRun) -> None:
        self.ended = command
        if command.status == "finished" and not self.trouble.early_returns:
            durable = max(self.remote.values(), default=-1)
            if durable < self.until_step and self.machine.state.generation:
                self.broken(f"finished with step {durable} durable of {self.until_step}: {command.reason}")
        waited = command.kind == "cluster" and "more came" in command.reason
        if self.stop_asked_at is not None and waited:
            self.broken(f"a stop was asked and the run ended otherwise: {command.reason}")
        if command.status == "failed" and self._harmless():
            self.broken(f"a run without trouble failed: {command}")

    def _harmless(self) -> bool:
        return self.trouble == Trouble()

    def _incident(self, incident: Any) -> None:
        self.incidents.append(incident)
        parts = incident.split()
        if abs(sum(parts.values()) - incident.rto_s) > 1e-6 or min(parts.values()) < 0 or incident.rto_s < 0:
            self.broken(f"the parts of an incident do not add up: {parts}, {incident}")
        if incident.new_world_size < 1 or incident.restored_step < 0:
            self.broken(f"an incident was closed half told: {incident}")

    # --- what must hold ----------------------------------------------------------------------------------------

    def _check(self, before: RunState, event: Any, commands: tuple[Any, ...]) -> None:
        state = self.machine.state
        if state.generation < before.generation:
            self.broken("the generation went back")
        for command in commands:
            if isinstance(command, life.BeginGeneration):
                killed = {c.member for c in commands if isinstance(c, life.KillMember)}
                self._check_begin(before, command, killed)
            if isinstance(command, life.StartRound) and self._round_open():
                self.broken("a round was started while one is open")
            if isinstance(command, life.StartRound) and self.round_at and not self.round_at.get("told"):
                self.broken("a round was started before the end of the last was heard")
        begun = [c for c in commands if isinstance(c, life.BeginGeneration)]
        if len(begun) > 1:
            self.broken("two generations at once")

    def _check_begin(self, before: RunState, command: life.BeginGeneration, killed: set[str]) -> None:
        state = self.machine.state
        if command.generation <= self.generation_seen:
            self.broken("the number of a generation was used twice")
        self.generation_seen = command.generation
        if len(command.ranks) != command.mesh.world_size or len(set(command.ranks)) != len(command.ranks):
            self.broken(f"{command.ranks} are not the ranks of {command.mesh}")
        if not self.limits.min_workers <= len(command.ranks) <= self.limits.max_workers:
            self.broken(f"{len(command.ranks)} ranks are outside the limits")
        for name in command.ranks:
            if name not in state.members:
                self.broken(f"{name} is not a member")
            rank = self.ranks.get(name)
            if rank is None:
                self.broken(f"{name} never started")
        for name in set(before.ranks) - killed:
            rank = self.ranks.get(name)
            if rank and rank.alive and rank.heard and rank.at not in ("idle",) and rank.generation == before.generation:
                self.broken(f"generation {command.generation} begins while {name} is still in {before.generation}")
        if self.round_at and not self.round_at.get("told"):
            self.broken("a generation begins while a round of the last one is open")
        order = command.restore
        best = max((s.step for s in state.node_snapshots if s.complete), default=-1)
        best = max(best, max((r.step for r in state.remotes), default=-1))
        if (order.step if order else -1) < best:
            self.broken(f"restores {order} though step {best} can be had")
        if order is not None and order.attempt not in self.committed:
            self.broken(f"restores {order.attempt}, which was never committed")
        if order is None and self.committed and not self._copies_lost():
            self.broken("begins afresh though a snapshot was committed and lives")

    def _copies_lost(self) -> bool:
        for attempt, (_, world) in self.committed.items():
            if attempt in self.remote and any(r.attempt == attempt for r in self.machine.state.remotes):
                return False
            held: set[int] = set()
            for store in self.controller_stores.values():
                if store.alive and attempt == store.committed and attempt in store.held:
                    held |= store.held[attempt].ranks
            if len(held) == world and self.trouble.restores_failed == 0:
                return False
        return True
