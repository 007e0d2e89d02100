"""Ranks that train in a made-up cluster: see ``made_up_run``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.made_up_cluster import Cluster
from support.made_up_gate import INTERRUPTED, WAIT, GateModel
from support.made_up_world import RankProcess, Shares

from elastic.errors import CorruptSnapshot
from elastic.gate import Order
from elastic.protocol import run_lifecycle as life


class Ranks(Cluster):
    """Does what the train threads of ranks do."""

    def tell(self, rank: RankProcess, act: Callable[..., None], *args: Any) -> None:
        """A call of the controller on a rank: in order, but that it may forget a thing before it is told of it."""
        self.point(f"before {act.__name__} of {rank.name}")
        at = self.now + self.latency()
        if act not in (self._release, self._interrupt) or self.random.random() < 0.9:
            at = rank.told_at = max(at, rank.told_at)
        self.later(at - self.now, self._called, self.epoch, rank, act, args)

    def _called(self, epoch: int, rank: RankProcess, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if rank.alive and epoch >= rank.epoch:
            act(*args)

    def say(self, rank: RankProcess, make: Callable[[float], Any]) -> None:
        """News of a rank: in order; what was not heard before it died may be lost."""
        rank.said_at = max(rank.said_at, self.now + self.latency())
        rank.said += 1
        self.later(rank.said_at - self.now, self._heard, rank, make, rank.said)

    def _heard(self, rank: RankProcess, make: Callable[[float], Any], number: int) -> None:
        if not self.down and number > rank.accounted and rank.heard and (rank.alive or self.random.random() < 0.5):
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
        rank.facts = {}
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
        rank.facts.update(entered=step, share_bytes=100)
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
            rank.facts["at_end"] = step
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
            rank.facts["stepped"] = True
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
        rank.facts.update(staged=order.attempt, staged_step=order.step)
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

        if generation == rank.generation:
            rank.facts["departure"] = life.Departure(
                rank.name, -1, cause, step, self.now, error, "", collateral, live_bytes=kept, failure=failure
            )
        self.say(rank, make)
        rank.at = "idle"
        self._poke(generation)
        self._next_order(rank)

    def _interrupt(self, rank: RankProcess, generation: int) -> None:
        rank.facts["interrupted"] = max(generation, rank.facts.get("interrupted", -1))
        if generation == rank.generation:
            rank.gate.interrupt()
            self._look(rank)
