"""A made-up cluster around the pure machines: nodes, stores, ranks, rounds and uploads in virtual time, from one seed.

Everything that the actors do for the machines is done here in a few lines, with messages that are late, processes that
die at any moment and users who ask for anything at any time. ``Run.play`` goes on until nothing is left to happen and
checks what must hold after every event; the first thing that does not raises Broken with the seed and the story.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from support.made_up_gate import INTERRUPTED, WAIT, GateModel

from elastic.errors import ConfigError, CorruptSnapshot, InternalError
from elastic.gate import Order
from elastic.protocol import run_lifecycle as life
from elastic.protocol import snapshot_round as rounds
from elastic.protocol.machine import Machine
from elastic.protocol.run_state import Limits, RunState
from elastic.protocol.shares import PointInTime, ShareReport, SlotRef
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot

LONGEST_S = 4000.0
MOST_EVENTS = 6000


class Broken(AssertionError):
    """Something that must hold does not."""


@dataclass(slots=True)
class Trouble:
    """What goes wrong in one history; probabilities are per occasion."""

    rank_kills: int = 0
    node_kills: int = 0
    store_kills: int = 0
    joins: int = 0
    requests: int = 0
    slots_refused: float = 0.0
    seals_failed: float = 0.0
    uploads_failed: float = 0.0
    starts_failed: float = 0.0
    restores_failed: float = 0.0
    error_steps: tuple[int, ...] = ()
    """Steps at which every rank raises, always."""
    errors_once: int = 0
    early_returns: tuple[int, ...] = ()
    """Ranks that leave the loop in their third step."""
    capture_fails: bool = False


@dataclass(slots=True)
class Shares:
    """What one store holds of one attempt."""

    step: int
    ranks: set[int] = field(default_factory=set)
    pins: int = 0


@dataclass(slots=True)
class StoreProcess:
    node: str
    alive: bool = True
    generation: int = 0
    held: dict[str, Shares] = field(default_factory=dict)
    committed: str = ""
    said_at: float = 0.0


@dataclass(slots=True)
class NodeMachine:
    name: str
    capacity: int
    domain: str
    alive: bool = True
    store: StoreProcess | None = None


@dataclass(slots=True)
class RankProcess:
    name: str
    node: NodeMachine
    alive: bool = True
    heard: bool = True
    generation: int = -1
    gate: GateModel = field(default_factory=GateModel)
    orders: list[Any] = field(default_factory=list)
    order: Any = None
    at: str = "idle"
    """idle, meeting, building, arrive, hold, step, blocked, staging, after, out"""
    step: int = 0
    first: bool = True
    said_at: float = 0.0
    told_at: float = 0.0
    in_group: bool = False
    returned: bool = False


class Run:
    """One history. ``seed`` decides everything."""

    def __init__(self, seed: int, *, trouble: Trouble | None = None, nodes: int = 0, steps: int = 0) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.trouble = trouble if trouble is not None else _trouble(self.random)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.counter = 0
        self.nodes: dict[str, NodeMachine] = {}
        self.ranks: dict[str, RankProcess] = {}
        self.controller_ranks: dict[str, RankProcess] = {}
        self.controller_stores: dict[str, StoreProcess] = {}
        self.until_step = steps or self.random.randint(1, 12)
        self.step_s = self.random.choice((0.02, 0.2, 2.0))
        self.lockstep = self.random.random() < 0.8
        self.slow = self.random.choice((1.0, 1.0, 1.0, 10.0, 100.0))
        self.every_s = self.random.choice((0.3, 1.0, 5.0, 1e9))
        self.round: Machine[rounds.RoundState] | None = None
        self.round_at: dict[str, Any] = {}
        self.round_ended: set[str] = set()
        self.attempts = 0
        self.committed: dict[str, tuple[int, int]] = {}
        """Attempt: step and world size, from the moment of the commit."""
        self.remote: dict[str, int] = {}
        self.upload: str = ""
        self.newest: rounds.RoundState | None = None
        self.done_step = -1
        self.finishing = False
        self.met: dict[int, set[str]] = {}
        self.errors_left = self.trouble.errors_once
        self.events = 0
        self.seen: dict[str, tuple[int, str]] = {}
        self.stop_asked_at: float | None = None
        self.ended: life.EndRun | None = None
        self.incidents: list[Any] = []
        self.queue_until = 0.0
        self.tick_at: float | None = None
        self.restores: list[tuple[int, int]] = []
        self.reached: set[str] = set()
        low = self.random.randint(1, 2)
        high = self.random.randint(low, 4)
        size = nodes or self.random.randint(1, 4)
        self.mesh = self.random.choice(({"dp": -1}, {"dp": -1}, {"dp": -1, "tp": 2 if high >= 2 else 1}))
        self.limits = Limits(
            self.mesh,
            low,
            high,
            replicas=self.random.randint(0, 1),
            unwind_timeout_s=10.0,
            form_timeout_s=120.0,
            wait_for_workers_s=self.random.choice((0.0, 10.0)),
            wait_for_cluster_s=600.0,
        )
        self.machine: Machine[RunState] = Machine("run", life.TABLE, RunState(self.limits, target=high))
        for number in range(size):
            self._add_node(number)
        self.generation_seen = 0

    # --- time ------------------------------------------------------------------------------------------------------

    def later(self, delay: float, act: Callable[..., None], *args: Any) -> None:
        self.counter += 1
        heapq.heappush(self.heap, (self.now + delay, self.counter, act, args))

    def latency(self) -> float:
        draw = self.random.random()
        return 0.001 * self.slow if draw < 0.6 else draw * 0.02 * self.slow if draw < 0.97 else 0.5 * self.slow * draw

    def play(self) -> Run:
        """Until the run has ended or nothing is left to happen. Raises Broken."""
        self._plan_trouble()
        self.later(0.0, self._view)
        self.later(0.0, self._measure)
        while self.heap and self.ended is None:
            self.now, _, act, args = heapq.heappop(self.heap)
            if self.now > LONGEST_S:
                self.broken(f"the run goes on for ever, in phase {self.machine.state.phase}")
            act(*args)
        if self.ended is None:
            self.broken(f"nothing is left to happen in phase {self.machine.state.phase}")
        return self

    def broken(self, why: str) -> None:
        story = "\n  ".join(line[:420] for line in self.machine.story[-30:])
        state = self.machine.state
        ranks = "\n  ".join(
            f"{r.name} on {r.node.name} alive={r.alive} g{r.generation} {r.at} step {r.step} gate {r.gate}"
            for r in self.ranks.values()
        )
        round_state = self.round.state if self.round else None
        raise Broken(f"seed {self.seed}: {why}\n{self.trouble}\n  {story}\n{state}\n  {ranks}\n{round_state}")

    # --- the controller ----------------------------------------------------------------------------------------------

    def post(self, event: Any) -> None:
        """Queue an event: handled in the order of posting, sometimes late."""
        self.queue_until = max(self.queue_until, self.now + (self.latency() if self.random.random() < 0.2 else 0.0))
        self.later(self.queue_until - self.now, self._handle, event)

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
        for command in commands:
            self._perform(command)
        self._arm()

    def _arm(self) -> None:
        deadline = self.machine.state.deadline
        if deadline is not None and deadline != self.tick_at:
            self.tick_at = deadline
            self.later(max(0.0, deadline - self.now), self._tick, deadline)

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
            self.later(self.latency(), self._store_started, command.node)
        elif isinstance(command, life.StartMember):
            self.later(self.latency() + 0.3 * self.slow * self.random.random(), self._started, command)
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
                self.later(1.0, self._probe, member)
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
        elif isinstance(command, life.MakeDurable):
            if not self.finishing:
                self.finishing = True
                self.later(0.0, self._make_durable, 0)
        elif isinstance(command, life.EndRun):
            self._end(command)

    def _end(self, command: life.EndRun) -> None:
        self.ended = command
        if command.status == "finished" and not self.trouble.early_returns:
            durable = max(self.remote.values(), default=-1)
            if durable < self.until_step and self.machine.state.generation:
                self.broken(f"finished with step {durable} durable of {self.until_step}: {command.reason}")
        if self.stop_asked_at is not None and command.status == "failed" and command.kind == "cluster":
            if "more came" in command.reason:
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

    # --- what must hold ------------------------------------------------------------------------------------------------

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

    # --- nodes, stores and members -------------------------------------------------------------------------------------

    def _add_node(self, number: int) -> None:
        name = f"n{number}"
        self.nodes[name] = NodeMachine(name, self.random.randint(1, 2), f"d{number % 3}")

    def _view(self) -> None:
        seen = {name: (node.capacity, node.domain) for name, node in self.nodes.items() if node.alive}
        if seen != self.seen:
            self.seen = seen
            self.post(life.ClusterSeen(self.now, dict(seen)))

    def _store_started(self, name: str) -> None:
        node = self.nodes[name]
        if not node.alive or self.random.random() < self.trouble.starts_failed:
            self.post(life.StoreLost(self.now, name, "its store did not start"))
            return
        node.store = self.controller_stores[name] = StoreProcess(name)
        self.post(life.StoreReady(self.now, name))

    def _started(self, command: life.StartMember) -> None:
        node = self.nodes[command.node]
        if command.member not in self.machine.state.members:
            return
        carried = sum(r.alive and r.node is node for r in self.ranks.values())
        if not node.alive or carried >= node.capacity or self.random.random() < self.trouble.starts_failed:
            self.post(life.MemberLost(self.now, command.member, "it did not start"))
            return
        self.ranks[command.member] = self.controller_ranks[command.member] = RankProcess(command.member, node)
        self.post(life.MemberReady(self.now, command.member))

    def _kill_member(self, name: str) -> None:
        rank = self.controller_ranks.pop(name, None)
        if rank is not None:
            rank.heard = False
            self._die(rank)

    def _die(self, rank: RankProcess) -> None:
        if not rank.alive:
            return
        rank.alive = False
        rank.in_group = False
        self._poke(rank.generation)

    def kill_rank(self, name: str = "") -> None:
        living = [r for r in self.ranks.values() if r.alive and (not name or r.name == name)]
        if living:
            rank = self.random.choice(living)
            self._die(rank)
            self.later(self.latency(), self._lost, rank)

    def _lost(self, rank: RankProcess) -> None:
        if rank.heard:
            rank.heard = False
            self.controller_ranks.pop(rank.name, None)
            self.post(life.MemberLost(self.now, rank.name, f"{rank.name} died"))

    def _probe(self, name: str) -> None:
        rank = self.controller_ranks.get(name)
        if rank is not None and not rank.alive:
            self._lost(rank)

    def kill_store(self) -> None:
        living = [n.store for n in self.nodes.values() if n.store is not None and n.store.alive]
        if living:
            self._store_dies(self.random.choice(living))

    def _store_dies(self, store: StoreProcess) -> None:
        store.alive = False
        self.later(self.latency(), self._store_gone, store)

    def _store_gone(self, store: StoreProcess) -> None:
        if self.controller_stores.get(store.node) is store:
            del self.controller_stores[store.node]
        self.post(life.StoreLost(self.now, store.node, f"the store of {store.node} is gone"))

    def kill_node(self) -> None:
        living = [n for n in self.nodes.values() if n.alive]
        if not living:
            return
        node = self.random.choice(living)
        node.alive = False
        if node.store is not None and node.store.alive:
            self._store_dies(node.store)
        for rank in self.ranks.values():
            if rank.node is node and rank.alive:
                self._die(rank)
                self.later(self.latency(), self._lost, rank)
        self.later(self.latency() * 10, self._view)

    def join(self) -> None:
        self._add_node(len(self.nodes))
        self.later(self.latency(), self._view)

    def ask(self) -> None:
        draw = self.random.random()
        if draw < 0.25:
            self.stop()
        elif draw < 0.9:
            self.post(life.ResizeAsked(self.now, self.random.randint(0, 5)))
        else:
            self.post(life.SnapshotDue(self.now))

    def stop(self) -> None:
        self.stop_asked_at = self.now
        self.post(life.StopAsked(self.now))

    def _plan_trouble(self) -> None:
        trouble, span = self.trouble, 3.0 + self.step_s * self.until_step * 1.5
        acts = [self.kill_rank] * trouble.rank_kills + [self.kill_node] * trouble.node_kills
        acts += [self.kill_store] * trouble.store_kills + [self.join] * trouble.joins + [self.ask] * trouble.requests
        for act in acts:
            self.later(self.random.random() * span * self.random.choice((0.3, 1.0, 1.0, 4.0)), act)
        for _ in range(2):  # so that the world allows an end: nodes come in late
            self.later(60.0 + self.random.random() * 60.0, self.join)

    # --- ranks ---------------------------------------------------------------------------------------------------------

    def tell(self, rank: RankProcess, act: Callable[..., None], *args: Any) -> None:
        """A call of the controller on a rank: in order, but that it may forget a thing before it is told of it."""
        at = self.now + self.latency()
        if act not in (self._release, self._interrupt) or self.random.random() < 0.9:
            at = rank.told_at = max(at, rank.told_at)
        self.later(at - self.now, self._called, rank, act, args)

    def _called(self, rank: RankProcess, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if rank.alive:
            act(*args)

    def say(self, rank: RankProcess, make: Callable[[float], Any]) -> None:
        """News of a rank: in order; what was not heard before it died may be lost."""
        rank.said_at = max(rank.said_at, self.now + self.latency())
        self.later(rank.said_at - self.now, self._heard, rank, make)

    def _heard(self, rank: RankProcess, make: Callable[[float], Any]) -> None:
        if rank.heard and (rank.alive or self.random.random() < 0.5):
            self.post(make(self.now))

    def _begin(self, command: life.BeginGeneration) -> None:
        for number, name in enumerate(command.ranks):
            rank = self.controller_ranks.get(name)
            if rank is not None:
                self.tell(rank, self._rank_begin, rank, (command, number))

    def _rank_begin(self, rank: RankProcess, order: tuple[life.BeginGeneration, int]) -> None:
        if order[0].generation <= rank.generation:
            return
        rank.generation = order[0].generation
        rank.gate = GateModel()
        rank.orders.append(order)
        self._next_order(rank)

    def _next_order(self, rank: RankProcess) -> None:
        if rank.at != "idle" or not rank.orders:
            return
        rank.order = rank.orders.pop(0)
        rank.step, rank.first, rank.at, rank.in_group, rank.returned = 0, True, "meeting", False, False
        command = rank.order[0]
        self.met.setdefault(command.generation, set()).add(rank.name)
        self._poke(command.generation)

    def _poke(self, generation: int) -> None:
        """Something changed for the ranks of a generation: those that wait look again."""
        for rank in list(self.ranks.values()):
            if rank.alive and rank.generation == generation:
                self._look(rank)

    def _look(self, rank: RankProcess) -> None:
        if rank.at == "meeting":
            if rank.gate.interrupted:
                self._depart(rank, "interrupted")
            elif self.met.get(rank.generation, set()) >= set(rank.order[0].ranks):
                rank.at, rank.in_group = "building", True
                self.later(self.latency() + self.random.random() * 0.2 * self.slow, self._built, rank, rank.generation)
        elif rank.at == "arrive":
            self._arrive(rank)
        elif rank.at in ("hold", "end"):
            self._hold(rank)
        elif rank.at == "blocked":
            self._try_step(rank)

    def _built(self, rank: RankProcess, generation: int) -> None:
        if not rank.alive or rank.at != "building" or rank.generation != generation:
            return
        command: life.BeginGeneration = rank.order[0]
        self.say(rank, lambda at: life.Formed(at, rank.name, generation, 0.001))
        peers = [self.ranks[name] for name in command.ranks]
        if self.lockstep and any(not p.alive or not p.in_group for p in peers) and self.random.random() < 0.5:
            self._depart(rank, "error", "connection reset by peer", collateral=True)
            return
        if command.restore is not None:
            step = self._restored(command.restore)
            if step is None:
                failure = CorruptSnapshot("a share cannot be had", "made up")
                self._depart(rank, "unreadable", str(failure), failure=failure)
                return
            rank.step = step
            self.restores.append((generation, step))
        rank.gate.step = 0
        if command.hold:
            rank.gate.will_hold(rank.step)
        elif rank.gate.arrive(rank.step) == INTERRUPTED:
            self._depart(rank, "interrupted")
            return
        step = rank.step
        self.say(rank, lambda at: life.Entered(at, rank.name, generation, step, 100))
        if command.hold:
            rank.at = "hold"
            self._hold(rank)
        else:
            self._go_on(rank)

    def _restored(self, order: Any) -> int | None:
        if self.random.random() < self.trouble.restores_failed:
            return None
        if order.node is not None:
            held = True
            for rank, places in order.node.places.items():
                stores = [self.nodes[n].store for n in places]
                held &= any(
                    s is not None and s.alive and s.committed == order.node.attempt
                    and rank in s.held.get(order.node.attempt, Shares(0)).ranks for s in stores
                )  # fmt: skip
            if held:
                return self.committed[order.node.attempt][0]
        if order.remote is not None and order.remote.attempt in self.remote:
            return self.remote[order.remote.attempt]
        return None

    def _go_on(self, rank: RankProcess) -> None:
        if rank.step >= self.until_step:
            rank.gate.will_hold(rank.step)
            step, generation = rank.step, rank.generation
            self.say(rank, lambda at: life.AtEnd(at, rank.name, generation, step))
            rank.at = "end"
            self._hold(rank)
            return
        rank.at = "step"
        spread = self.random.choice((1.0, 1.0, 1.0, 1.0, 3.0))
        self.later(self.step_s * (0.5 + self.random.random()) * spread, self._worked, rank, rank.generation)

    def _worked(self, rank: RankProcess, generation: int) -> None:
        if not rank.alive or rank.at != "step" or rank.generation != generation:
            return
        number = rank.order[1]
        if number in self.trouble.early_returns and rank.step == 2:
            rank.at = "after"
            self.later(0.0, self._depart, rank, "finished")
            return
        if rank.step in self.trouble.error_steps:
            self._depart(rank, "error", f"ValueError: bad value in step {rank.step} on rank {number}")
            return
        if self.errors_left and self.random.random() < 0.1:
            self.errors_left -= 1
            self._depart(rank, "error", f"ValueError: {self.random.random()}")
            return
        rank.at = "blocked"
        self._try_step(rank)
        self._poke(generation)

    def _try_step(self, rank: RankProcess) -> None:
        if self.lockstep:
            for name in rank.order[0].ranks:
                peer = self.ranks[name]
                started = peer.alive and peer.generation == rank.generation and peer.in_group
                if not started:
                    rank.at = "breaking"
                    slow = self.random.random() < 0.1
                    self.later(120.0 if slow else self.latency(), self._peer_gone, rank, rank.generation)
                    return
                behind = peer.step < rank.step or (peer.step == rank.step and peer.at != "blocked")
                if behind:
                    if peer.returned:
                        rank.at = "breaking"
                        self.later(120.0, self._peer_gone, rank, rank.generation)
                    return
        rank.step += 1
        generation, step = rank.generation, rank.step
        if rank.first:
            rank.first = False
            self.say(rank, lambda at: life.FirstStep(at, rank.name, generation, step))
        rank.at = "arrive"
        self._arrive(rank)
        self._poke(generation)

    def _peer_gone(self, rank: RankProcess, generation: int) -> None:
        if rank.alive and rank.at == "breaking" and rank.generation == generation:
            self._depart(rank, "error", "connection closed by peer", collateral=True)

    def _arrive(self, rank: RankProcess) -> None:
        answer = rank.gate.arrive(rank.step)
        if answer == WAIT:
            return
        if answer == INTERRUPTED:
            self._depart(rank, "interrupted")
        elif answer is None:
            self._go_on(rank)
        else:
            self._stage(rank, answer)

    def _hold(self, rank: RankProcess) -> None:
        answer = rank.gate.hold(rank.step)
        if answer == WAIT:
            return
        if answer == INTERRUPTED:
            self._depart(rank, "interrupted")
        else:
            self._stage(rank, answer)

    def _stage(self, rank: RankProcess, order: Any) -> None:
        came_from, rank.at = rank.at, "staging"
        self.later(self.latency(), self._staged, rank, rank.generation, order, came_from)

    def _staged(self, rank: RankProcess, generation: int, order: Order, came_from: str) -> None:
        if not rank.alive or rank.at != "staging" or rank.generation != generation:
            return
        number, step = rank.order[1], rank.step
        store = rank.node.store
        if store is not None and store.alive:
            fails = self.random.random() < self.trouble.seals_failed
            self.later(self.latency(), self._seal, store, order.attempt, number, step, generation, fails)
        if order.stop:
            self._depart(rank, "interrupted")
        elif came_from == "end":
            rank.at = "after"
            wait = 0.0 if self.random.random() < 0.7 else self.random.random() * 3 * self.slow
            self.later(wait, self._returned, rank, generation)
        else:
            self._go_on(rank)
        self._poke(generation)

    def _returned(self, rank: RankProcess, generation: int) -> None:
        if rank.alive and rank.at == "after" and rank.generation == generation:
            self._depart(rank, "finished")

    def _depart(
        self, rank: RankProcess, cause: str, error: str = "", *, collateral: bool = False, failure: Any = None
    ) -> None:
        if not rank.alive:
            return
        generation, step = rank.order[0].generation, rank.step
        rank.in_group = cause == "finished" and rank.in_group
        rank.returned = cause == "finished"
        stood = cause in ("error", "interrupted") and rank.at not in ("meeting", "building")
        kept = 100 if stood and self.random.random() < 0.8 else 0

        def make(at: float) -> Any:
            found = self.machine.state.rank_of(rank.name)
            departure = life.Departure(
                rank.name,
                -1 if found is None else found,
                cause,
                step,
                at,
                error,
                "",
                collateral,
                live_bytes=kept,
                failure=failure,
            )
            return life.Departed(at, generation, departure)

        self.say(rank, make)
        rank.at = "idle"
        self._poke(generation)
        self._next_order(rank)

    def _interrupt(self, rank: RankProcess, generation: int) -> None:
        if generation == rank.generation:
            rank.gate.interrupt()
            self._look(rank)

    # --- snapshot rounds -----------------------------------------------------------------------------------------------

    def _round_open(self) -> bool:
        return self.round is not None and self.round.state.phase not in (rounds.COMMITTED, rounds.ABANDONED)

    def _start_round(self, command: life.StartRound) -> None:
        state = self.machine.state
        held = None
        if command.purpose == "entry":
            held = 0
        elif command.purpose == "final":
            held = max(state.at_end.values())
        self.attempts += 1
        attempt = f"a{self.attempts}"
        nodes = {rank: state.members[name].node for rank, name in enumerate(state.ranks)}
        self.round_at = {
            "held": held,
            "ranks": {rank: self.controller_ranks.get(name) for rank, name in enumerate(state.ranks)},
            "told": False,
        }
        begun, commands = rounds.begin(
            rounds.RoundState(
                attempt, command.purpose, state.generation, command.stop, nodes, life.peers(state), dict(state.entered)
            )
        )
        self.round = Machine("round", rounds.TABLE, begun)
        self._do_round(commands)

    def _start_salvage(self, command: life.StartSalvage) -> None:
        """A round of survivors that hold still, numbered among themselves."""
        state = self.machine.state
        names = dict(enumerate(state.ranks[rank] for rank in command.ranks))
        for rank in command.ranks:
            if state.departures[rank].step != command.step or not state.departures[rank].live_bytes:
                self.broken(f"rank {rank} does not stand at step {command.step}")
        self.attempts += 1
        self.round_at = {
            "held": command.step,
            "ranks": {place: self.controller_ranks.get(name) for place, name in names.items()},
            "told": False,
        }
        nodes = {place: state.members[name].node for place, name in names.items()}
        begun, commands = rounds.begin(
            rounds.RoundState(
                f"a{self.attempts}",
                rounds.LIVE,
                state.generation,
                False,
                nodes,
                life.peers(state),
                dict.fromkeys(names, 100),
                step=command.step,
            )
        )
        self.round = Machine("round", rounds.TABLE, begun)
        self._do_round(commands)

    def _stage_live(self, rank: RankProcess, state: rounds.RoundState, place: int) -> None:
        store = rank.node.store
        if rank.alive and store is not None and store.alive:
            fails = self.random.random() < self.trouble.seals_failed
            self.later(self.latency(), self._seal, store, state.attempt, place, state.step, state.generation, fails)

    def _feed(self, event: Any) -> None:
        assert self.round is not None
        try:
            commands = self.round.handle(event)
        except (InternalError, KeyError, ValueError) as error:
            self.broken(f"{type(error).__name__}: {error}")
        self._do_round(commands)

    def _if_open(self, attempt: str, event: Any) -> None:
        if self.round is not None and self.round.state.attempt == attempt and self._round_open():
            self._feed(event)

    def _store_says(self, attempt: str, event: Any) -> None:
        if self.round is not None and self.round.state.attempt == attempt:
            self._feed(event)

    def _do_round(self, commands: tuple[Any, ...]) -> None:
        assert self.round is not None
        state = self.round.state
        if any(isinstance(command, rounds.CommitNodeTier) for command in commands):
            if state.attempt in self.round_ended:
                self.broken("an attempt that was given up was committed")
            steps = {report.point.step for report in state.reports.values()}
            if len(steps) != 1 or steps != {state.step}:
                self.broken(f"shares of steps {steps} were committed as step {state.step}")
            self.later(self.latency(), self._commit, state, commands)
            return
        for command in commands:
            self._do(state, command)

    def _commit(self, state: rounds.RoundState, commands: tuple[Any, ...]) -> None:
        self.committed[state.attempt] = (state.step, len(state.nodes))
        for command in commands:
            self._do(state, command)

    def _do(self, state: rounds.RoundState, command: Any) -> None:
        ranks = {number: rank for number, rank in self.round_at["ranks"].items() if rank is not None}
        if isinstance(command, rounds.OpenSlots):
            self.later(self.latency(), self._open_slots, state, command)
        elif isinstance(command, rounds.NameBoundary):
            self.later(self.latency(), self._name, state, command)
        elif isinstance(command, rounds.Propose):
            rank = ranks.get(command.rank)
            if rank is None or not rank.alive:
                event = rounds.ShareFailed(command.rank, "the rank does not answer")
                self.later(self.latency(), self._if_open, state.attempt, event)
                return
            self.tell(rank, self._propose, rank, state, command)
            self.later(30.0, self._no_answer, rank, state, command)
        elif isinstance(command, rounds.StageLive):
            if (rank := ranks.get(command.rank)) is not None:
                self.tell(rank, self._stage_live, rank, state, command.rank)
        elif isinstance(command, rounds.Confirm):
            for rank in ranks.values():
                self.tell(rank, self._confirm, rank, state.generation, command)
        elif isinstance(command, rounds.ReleaseRanks):
            for rank in ranks.values():
                self.tell(rank, self._release, rank, state.generation, command)
        elif isinstance(command, rounds.CommitNodeTier):
            for store in list(self.controller_stores.values()):
                self._store_commit(store, command.attempt)  # the run hears of it when they have answered
        elif isinstance(command, rounds.AbandonShares):
            self.round_ended.add(command.attempt)
            for store in list(self.controller_stores.values()):
                self.later(self.latency(), self._store_abandon, store, command.attempt)
        elif isinstance(command, rounds.RoundEnded):
            self._round_over(command.state)

    def _round_over(self, state: rounds.RoundState) -> None:
        if state.phase != rounds.COMMITTED:
            self.post(_abandoned(self.now, state))
        else:
            self.newest = state
            if not self.upload and self.random.random() < 0.7:
                self._upload(state)
            snapshot = NodeSnapshot(state.attempt, state.step, state.places)
            self.post(life.NodeCommitted(self.now, state.generation, snapshot, state.purpose))

    def _open_slots(self, state: rounds.RoundState, command: rounds.OpenSlots) -> None:
        store = self.controller_stores.get(command.node)
        event: Any = rounds.SlotsRefused(command.node, "its store does not answer")
        if store is not None and store.alive:
            if state.generation > store.generation:
                store.generation = state.generation
                for name in [a for a in store.held if a != store.committed and not store.held[a].pins]:
                    del store.held[name]
            if self.random.random() < self.trouble.slots_refused:
                event = rounds.SlotsRefused(command.node, "no arena slot is free")
            else:
                store.held.setdefault(command.attempt, Shares(-1))
                slots = {rank: SlotRef(f"/{command.node}/{rank}", 100, rank) for rank in command.share_bytes}
                event = rounds.SlotsOpened(command.node, slots)
        self.later(self.latency(), self._if_open, state.attempt, event)

    def _name(self, state: rounds.RoundState, command: rounds.NameBoundary) -> None:
        step = self.round_at["held"]
        if step is None:
            reached = [r.gate.step for r in self.round_at["ranks"].values() if r is not None and r.alive]
            lead = 1 + int(0.03 / self.step_s)
            step = max(command.at_least, max(reached, default=-1) + lead)
        self._if_open(state.attempt, rounds.BoundaryNamed(step))

    def _propose(self, rank: RankProcess, state: rounds.RoundState, command: rounds.Propose) -> None:
        accepted, reached = False, -1
        if state.generation == rank.generation:
            held = self.round_at["held"] is not None
            accepted, reached = rank.gate.propose(
                Order(command.attempt, command.step, command.slot, command.stop, 0, held=held)
            )
            self._look(rank)
        event: Any = rounds.Passed(command.rank, command.step, reached)
        if accepted:
            event = rounds.Accepted(command.rank, command.step)
        self.later(self.latency(), self._answer, rank, state.attempt, event)

    def _answer(self, rank: RankProcess, attempt: str, event: Any) -> None:
        if rank.alive:
            self._if_open(attempt, event)
        else:
            self._if_open(attempt, rounds.ShareFailed(event.rank, "the rank does not answer"))

    def _no_answer(self, rank: RankProcess, state: rounds.RoundState, command: rounds.Propose) -> None:
        if not rank.alive:
            self._if_open(state.attempt, rounds.ShareFailed(command.rank, "the rank does not answer"))

    def _confirm(self, rank: RankProcess, generation: int, command: rounds.Confirm) -> None:
        if generation == rank.generation:
            rank.gate.confirm(command.attempt, command.step)
            self._look(rank)

    def _release(self, rank: RankProcess, generation: int, command: rounds.ReleaseRanks) -> None:
        if generation == rank.generation:
            rank.gate.release(command.attempt)
            self._look(rank)

    def _seal(self, store: StoreProcess, attempt: str, rank: int, step: int, generation: int, fails: bool) -> None:
        if not store.alive:
            return
        held = store.held.get(attempt)
        if fails or held is None:
            self._say_store(store, attempt, rounds.ShareFailed(rank, "it was not sealed"))
            return
        held.step = step
        held.ranks.add(rank)
        peer_name = self.round.state.peers.get(store.node, "") if self.round else ""
        self.later(self.latency(), self._replicated, store, attempt, rank, step, generation, peer_name)

    def _replicated(
        self, store: StoreProcess, attempt: str, rank: int, step: int, generation: int, peer_name: str
    ) -> None:
        places: tuple[str, ...] = (store.node,)
        if peer_name:
            peer = self.nodes[peer_name].store
            if peer is None or not peer.alive:
                self._say_store(store, attempt, rounds.ShareFailed(rank, "the replica was not made"))
                return
            held = peer.held.setdefault(attempt, Shares(step))
            held.step = step
            held.ranks.add(rank)
            places = (store.node, peer_name)
        report = ShareReport(attempt, rank, PointInTime(generation, step), 100, "d", 0.0, {})
        self._say_store(store, attempt, rounds.ShareSealed(report, places))

    def _say_store(self, store: StoreProcess, attempt: str, event: Any) -> None:
        store.said_at = max(store.said_at, self.now + self.latency())
        self.later(store.said_at - self.now, self._store_heard, store, attempt, event)

    def _store_heard(self, store: StoreProcess, attempt: str, event: Any) -> None:
        if store.alive or self.random.random() < 0.5:
            self._store_says(attempt, event)

    def _store_commit(self, store: StoreProcess, attempt: str) -> None:
        former, store.committed = store.committed, attempt
        if former != attempt and former in store.held and not store.held[former].pins:
            del store.held[former]

    def _store_abandon(self, store: StoreProcess, attempt: str) -> None:
        if attempt != store.committed:
            store.held.pop(attempt, None)

    # --- uploads -------------------------------------------------------------------------------------------------------

    def _upload(self, state: rounds.RoundState) -> None:
        self.upload = state.attempt
        pinned = [s for s in self.controller_stores.values() if s.alive and state.attempt in s.held]
        for store in pinned:
            store.held[state.attempt].pins += 1
        self.later(self.random.random() * 2.0 * self.slow, self._uploaded, state, pinned)

    def _uploaded(self, state: rounds.RoundState, pinned: list[StoreProcess]) -> None:
        self.upload = ""
        held: set[int] = set()
        for store in self.controller_stores.values():
            if store.alive and state.attempt in store.held:
                held |= store.held[state.attempt].ranks
        for store in pinned:
            store.held[state.attempt].pins -= 1
            if store.committed != state.attempt and not store.held[state.attempt].pins:
                del store.held[state.attempt]
        if self.random.random() < self.trouble.uploads_failed or len(held) < len(state.nodes):
            return
        self.remote[state.attempt] = state.step
        self.done_step = state.step
        self.post(life.RemoteCommitted(self.now, RemoteSnapshot(state.attempt, state.step)))

    def _make_durable(self, tries: int) -> None:
        if self.newest is None or (not self.upload and self.done_step >= self.newest.step):
            self.finishing = False
            self.post(life.UploadsIdle(self.now))
        elif tries > 200 or (not self.upload and tries > 3):
            self.finishing = False
            self.post(life.UploadsIdle(self.now, "it did not become durable"))
        else:
            if not self.upload:
                self._upload(self.newest)
                tries += 1
            self.later(0.1 * self.slow, self._make_durable, tries)

    def _measure(self) -> None:
        if self.machine.state.phase == life.RUNNING and not self._round_open() and self.ended is None:
            self.post(life.SnapshotDue(self.now))
        if self.now < LONGEST_S and self.every_s < 1e6 and self.now < 300:
            self.later(self.every_s, self._measure)


def _abandoned(at: float, state: rounds.RoundState) -> life.RoundAbandoned:
    return life.RoundAbandoned(
        at, state.generation, state.purpose, state.reason, *([state.confirmed] if hasattr(state, "confirmed") else [])
    )


def _trouble(draw: random.Random) -> Trouble:
    """Anything from nothing at all to everything at once."""
    kind = draw.random()
    if kind < 0.1:
        return Trouble()

    def some(most: int, chance: float) -> int:
        return draw.randint(1, most) if draw.random() < chance else 0

    def rate(most: float, chance: float) -> float:
        return draw.random() * most if draw.random() < chance else 0.0

    return replace(
        Trouble(),
        rank_kills=some(3, 0.5),
        node_kills=some(2, 0.4),
        store_kills=some(1, 0.25),
        joins=some(2, 0.3),
        requests=some(3, 0.5),
        slots_refused=rate(0.5, 0.2),
        seals_failed=rate(0.3, 0.2),
        uploads_failed=rate(1.0, 0.2),
        starts_failed=rate(0.5, 0.2),
        restores_failed=rate(0.3, 0.1),
        error_steps=(draw.randint(0, 9),) if draw.random() < 0.1 else (),
        errors_once=some(2, 0.15),
        early_returns=(draw.choice(((0,), (0, 1), (0, 1, 2, 3)))) if draw.random() < 0.07 else (),
    )


__all__ = ["Broken", "ConfigError", "Run", "Trouble"]
