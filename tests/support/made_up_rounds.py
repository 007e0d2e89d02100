"""Snapshot rounds and uploads of a made-up cluster: see ``made_up_run``."""

from __future__ import annotations

from typing import Any

from support.made_up_ranks import Ranks
from support.made_up_world import RankProcess, Shares, StoreProcess

from elastic.errors import InternalError
from elastic.gate import Order
from elastic.protocol import run_lifecycle as life
from elastic.protocol import snapshot_round as rounds
from elastic.protocol.machine import Machine
from elastic.protocol.shares import PointInTime, ShareReport, SlotRef
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot


class Rounds(Ranks):
    """Does what the shells of rounds and uploads and the stores do."""

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
        if rank.facts.get("live") == state.attempt:
            return
        rank.facts["live"] = state.attempt
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
            self.soon(self.latency(), self._commit, state, commands)
            return
        for command in commands:
            self.point(f"before {type(command).__name__} of {state.purpose}")
            self._do(state, command)
            self.point(f"after {type(command).__name__} of {state.purpose}")

    def _commit(self, state: rounds.RoundState, commands: tuple[Any, ...]) -> None:
        self.point("before the commit is in the journal")
        if self.flush():
            self.decided.add(state.attempt)
            self.committed[state.attempt] = (state.step, len(state.nodes))
        self.point("after the commit is in the journal")
        for command in commands:
            self.point(f"before {type(command).__name__} of {state.purpose}")
            self._do(state, command)
            self.point(f"after {type(command).__name__} of {state.purpose}")

    def _do(self, state: rounds.RoundState, command: Any) -> None:
        ranks = {number: rank for number, rank in self.round_at["ranks"].items() if rank is not None}
        if isinstance(command, rounds.OpenSlots):
            self.later(self.latency(), self._open_slots, self.epoch, state, command)
        elif isinstance(command, rounds.NameBoundary):
            self.soon(self.latency(), self._name, state, command)
        elif isinstance(command, rounds.Propose):
            rank = ranks.get(command.rank)
            if rank is None or not rank.alive:
                event = rounds.ShareFailed(command.rank, "the rank does not answer")
                self.soon(self.latency(), self._if_open, state.attempt, event)
                return
            self.tell(rank, self._propose, rank, state, command, self.round_at["held"] is not None)
            self.soon(30.0, self._no_answer, rank, state, command)
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
                self.committed[state.attempt] = (state.step, len(state.nodes))
                self._store_commit(store, command.attempt)
                self.point("after a store was told of the commit")  # the run hears of it when they have answered
        elif isinstance(command, rounds.AbandonShares):
            self.round_ended.add(command.attempt)
            for store in list(self.controller_stores.values()):
                self.point("before a store is told to abandon")
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

    def _open_slots(self, epoch: int, state: rounds.RoundState, command: rounds.OpenSlots) -> None:
        if epoch != self.epoch:
            return
        store = self.controller_stores.get(command.node)
        event: Any = rounds.SlotsRefused(command.node, "its store does not answer")
        if store is not None and store.alive:
            if state.generation > store.generation:
                store.generation = state.generation
                for name in [a for a in store.held if a != store.committed]:
                    self._give_back(store, name)
            if self.random.random() < self.trouble.slots_refused:
                event = rounds.SlotsRefused(command.node, "no arena slot is free")
            else:
                store.held.setdefault(command.attempt, Shares(-1)).opened = state
                slots = {rank: SlotRef(f"/{command.node}/{rank}", 100, rank) for rank in command.share_bytes}
                event = rounds.SlotsOpened(command.node, slots)
        self.soon(self.latency(), self._if_open, state.attempt, event)

    def _name(self, state: rounds.RoundState, command: rounds.NameBoundary) -> None:
        step = self.round_at["held"]
        if step is None:
            reached = [r.gate.step for r in self.round_at["ranks"].values() if r is not None and r.alive]
            lead = 1 + int(0.03 / self.step_s)
            step = max(command.at_least, max(reached, default=-1) + lead)
        self._if_open(state.attempt, rounds.BoundaryNamed(step))

    def _propose(self, rank: RankProcess, state: rounds.RoundState, command: rounds.Propose, held: bool) -> None:
        accepted, reached = False, -1
        if state.generation == rank.generation:
            accepted, reached = rank.gate.propose(
                Order(command.attempt, command.step, command.slot, command.stop, 0, held=held)
            )
            self._look(rank)
        event: Any = rounds.Passed(command.rank, command.step, reached)
        if accepted:
            event = rounds.Accepted(command.rank, command.step)
        self.soon(self.latency(), self._answer, rank, state.attempt, event)

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
            if held is not None:
                held.failed[rank] = "it was not sealed"
            self._say_store(store, attempt, rounds.ShareFailed(rank, "it was not sealed"))
            return
        held.step = step
        held.ranks.add(rank)
        held.world_size = len(held.opened.nodes) if held.opened else 0
        held.reports[rank] = ShareReport(attempt, rank, PointInTime(generation, step), 100, "d", 0.0, {})
        peer_name = held.opened.peers.get(store.node, "") if held.opened else ""
        self.later(self.latency(), self._replicated, store, attempt, rank, step, generation, peer_name)

    def _replicated(
        self, store: StoreProcess, attempt: str, rank: int, step: int, generation: int, peer_name: str
    ) -> None:
        places: tuple[str, ...] = (store.node,)
        own = store.held.get(attempt)
        if peer_name:
            peer = self.nodes[peer_name].store
            if peer is None or not peer.alive:
                if own is not None:
                    own.failed[rank] = "the replica was not made"
                self._say_store(store, attempt, rounds.ShareFailed(rank, "the replica was not made"))
                return
            held = peer.held.setdefault(attempt, Shares(step))
            held.step = step
            held.ranks.add(rank)
            held.world_size = own.world_size if own is not None else 0
            held.reports[rank] = ShareReport(attempt, rank, PointInTime(generation, step), 100, "d", 0.0, {})
            places = (store.node, peer_name)
        report = ShareReport(attempt, rank, PointInTime(generation, step), 100, "d", 0.0, {})
        if own is not None:
            own.sealed[rank] = places
        self._say_store(store, attempt, rounds.ShareSealed(report, places))

    def _say_store(self, store: StoreProcess, attempt: str, event: Any) -> None:
        store.said_at = max(store.said_at, self.now + self.latency())
        store.said += 1
        self.later(store.said_at - self.now, self._store_heard, store, attempt, event, store.said)

    def _store_heard(self, store: StoreProcess, attempt: str, event: Any, number: int) -> None:
        if self.down or number <= store.accounted:
            return
        if store.alive or self.random.random() < 0.5:
            self._store_says(attempt, event)

    def _store_commit(self, store: StoreProcess, attempt: str) -> None:
        former, store.committed = store.committed, attempt
        if former != attempt and former in store.held:
            self._give_back(store, former)

    def _store_abandon(self, store: StoreProcess, attempt: str) -> None:
        if attempt != store.committed and attempt in store.held:
            self._give_back(store, attempt)

    def _give_back(self, store: StoreProcess, attempt: str) -> None:
        if store.held[attempt].pins:
            store.held[attempt].closed = True
        else:
            del store.held[attempt]

    # --- uploads ----------------------------------------------------------------------------------------

    def _upload(self, state: rounds.RoundState) -> None:
        self.upload = state.attempt
        pinned = [s for s in self.controller_stores.values() if s.alive and state.attempt in s.held]
        for store in pinned:
            store.held[state.attempt].pins += 1
        self.later(self.random.random() * 2.0 * self.slow, self._uploaded, self.epoch, state, pinned)

    def _uploaded(self, epoch: int, state: rounds.RoundState, pinned: list[StoreProcess]) -> None:
        here = epoch == self.epoch and not self.down
        if here:
            self.upload = ""
        held: set[int] = set()
        for store in pinned:
            if store.alive and state.attempt in store.held:
                held |= store.held[state.attempt].ranks
        for store in pinned:
            store.held[state.attempt].pins -= 1
            if store.committed != state.attempt and not store.held[state.attempt].pins:
                del store.held[state.attempt]
        if self.random.random() < self.trouble.uploads_failed or len(held) < len(state.nodes):
            return
        if not here and self.killer.random() < 0.5:
            return  # nobody asked a store for the marker
        self.remote[state.attempt] = state.step
        if not here:
            return
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
            self.soon(0.1 * self.slow, self._make_durable, tries)

    def _measure(self) -> None:
        if self.down:
            pass
        elif self.machine.state.phase == life.RUNNING and not self._round_open() and self.ended is None:
            self.flush()
            self.post(life.SnapshotDue(self.now))
        if self.every_s < 1e6 and self.now < 300:
            self.later(self.every_s, self._measure)


def _abandoned(at: float, state: rounds.RoundState) -> life.RoundAbandoned:
    return life.RoundAbandoned(
        at, state.generation, state.purpose, state.reason, *([state.confirmed] if hasattr(state, "confirmed") else [])
    )
