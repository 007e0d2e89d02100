"""The controller of a made-up cluster is killed between any two of its commands, and another one takes over."""

from __future__ import annotations

import json
from typing import Any

from support.made_up_rounds import Rounds
from support.made_up_world import RankProcess, StoreProcess

from elastic.protocol import run_lifecycle as life
from elastic.protocol import snapshot_round as rounds
from elastic.protocol.adoption import Adopted, AttemptFacts, Facts, RankFacts, StoreFacts, adopt
from elastic.protocol.machine import Machine
from elastic.protocol.run_record import record_of, state_of
from elastic.protocol.run_state import RunState
from elastic.protocol.shares import SlotRef
from elastic.protocol.tiers import RemoteSnapshot


class Failover(Rounds):
    """What a successor does, as the controller's actor does it."""

    def flush(self) -> bool:
        """Write the journal. False where the storage does not take it."""
        if self.killer.random() < self.trouble.journal_fails:
            return False
        self.journal = json.dumps(record_of(self.machine.state))
        return True

    def _controller_dies(self) -> None:
        self.down = True
        self.epoch += 1
        self.round, self.round_at, self.upload, self.newest, self.finishing = None, {}, "", None, False
        self.controller_ranks, self.controller_stores, self.tick_at = {}, {}, None
        self.queue_until = self.now
        self.later(self.killer.choice((0.0, 0.5, 2.0, 60.0)), self._adopt)

    def _adopt(self) -> None:
        self.down = False
        self.adoptions += 1
        for store in self._stores():
            store.epoch, store.accounted = self.epoch, store.said
        living = [rank for rank in self.ranks.values() if rank.alive]
        for rank in self.ranks.values():
            rank.heard, rank.epoch, rank.accounted = rank.alive, self.epoch, rank.said
        self.controller_ranks = {rank.name: rank for rank in living}
        self.controller_stores = {store.node: store for store in self._stores()}
        self.seen = self.living_nodes()
        blank = RunState(self.limits, target=self.limits.max_workers)
        record = state_of(json.loads(self.journal), self.limits) if self.journal else blank
        ranks = {rank.name: _rank_facts(rank) for rank in living}
        ranks |= {name: RankFacts(name, node, False) for name, node in self.starting.items() if name not in ranks}
        facts = Facts(
            record=record,
            decided=frozenset(self.decided),
            view=dict(self.seen),
            stores={store.node: _store_facts(store) for store in self._stores()},
            ranks=ranks,
            remotes=tuple(RemoteSnapshot(a, step) for a, step in sorted(self.remote.items(), key=lambda i: -i[1])),
        )
        adopted = adopt(facts, self.now)
        if adopt(facts, self.now) != adopted:
            self.broken("the same facts were adopted in two ways")
        self._check_adopted(facts, adopted)
        story = self.machine.story
        self.machine = Machine("run", life.TABLE, adopted.state)
        self.machine._story[:] = [*story, f"--- controller {self.epoch} adopts: {adopted.commands}"]
        self.generation_seen = max(record.generation, *(own.generation for own in ranks.values()), 0)
        self._take_over(adopted)

    def _take_over(self, adopted: Adopted) -> None:
        for store in list(self.controller_stores.values()):
            if adopted.committed is not None:
                self.committed.setdefault(
                    adopted.committed.attempt, (adopted.committed.step, len(adopted.committed.places))
                )
                self._store_commit(store, adopted.committed.attempt)
                self.point("after an adopted commit was told to a store")
            for attempt in adopted.given_up:
                self._store_abandon(store, attempt)
        self.round_ended |= set(adopted.given_up)
        state = adopted.state
        for attempt in adopted.given_up:
            for name in state.ranks:
                if rank := self.controller_ranks.get(name):
                    self.tell(rank, self._release, rank, state.generation, rounds.ReleaseRanks(attempt))
        self.newest = adopted.committed
        self.done_step = max(self.remote.values(), default=-1)
        for member in state.members.values():
            if member.phase == "starting" and member.name in self.starting:
                self.soon(self.latency(), self._started, life.StartMember(member.name, member.node))
        if adopted.round is not None:
            self._go_on_with(adopted)
        for command in adopted.commands:
            if isinstance(command, life.BeginGeneration) and command.generation > self.generation_seen:
                killed = {c.member for c in adopted.commands if isinstance(c, life.KillMember)}
                self._check_begin(state, command, killed)
                self.flush()
        self._carry_out(adopted.commands)
        if self.stop_asked_at is not None and not state.stop_asked:
            self.post(life.StopAsked(self.now))  # whoever asked was not answered, and asks again

    def _go_on_with(self, adopted: Adopted) -> None:
        state, going = adopted.state, adopted.round
        assert going is not None
        names = list(state.ranks)
        if going.purpose == rounds.LIVE:
            names = [state.ranks[rank] for rank in state.salvage or ()]
        self.round = Machine("round", rounds.TABLE, going)
        self.round_at = {
            "held": going.step,
            "ranks": {place: self.controller_ranks.get(name) for place, name in enumerate(names)},
            "told": False,
        }
        if going.purpose == rounds.LIVE:
            told: tuple[Any, ...] = tuple(
                rounds.StageLive(place, going.attempt, going.slots[place]) for place in sorted(going.nodes)
            )
        else:
            told = (rounds.Confirm(going.attempt, going.step),)
        self._do_round(told)
        for event in adopted.sealed:
            self._if_open(going.attempt, event)

    def _stores(self) -> list[StoreProcess]:
        found = [node.store for node in self.nodes.values() if node.store is not None and node.store.alive]
        return [store for store in found if store is not None]

    def _check_adopted(self, facts: Facts, adopted: Adopted) -> None:
        found = adopted.committed
        if found is not None and len({report.point for report in found.reports.values()}) != 1:
            self.broken("shares of several moments were adopted as one snapshot")
        if found is not None and found.attempt in self.round_ended:
            self.broken("an attempt that was given up was adopted as committed")
        best = max((step for a, (step, _) in self.committed.items() if self._whole(a)), default=-1)
        if best > (found.step if found else -1) and not any(r.step >= best for r in facts.remotes):
            self.broken(f"step {best} was committed and the successor does not know of it")

    def _whole(self, attempt: str) -> bool:
        """Whether every store that has committed the attempt holds all of it together, and none has gone further."""
        held: set[int] = set()
        for store in self._stores():
            if store.committed == attempt and attempt in store.held:
                held |= store.held[attempt].ranks
        return len(held) == self.committed[attempt][1]


def _rank_facts(rank: RankProcess) -> RankFacts:
    gate, order = rank.gate, rank.gate.order
    begun = rank.orders[0][0] if rank.orders else rank.order[0] if rank.order and rank.generation >= 0 else None
    return RankFacts(
        rank.name,
        rank.node.name,
        True,
        rank.generation,
        ranks=begun.ranks if begun else (),
        mesh=begun.mesh if begun else None,
        restoring=begun.restore if begun else None,
        holding=rank.at in ("hold", "end"),
        ordered=order.attempt if order else "",
        ordered_step=order.step if order else -1,
        confirmed=gate.confirmed,
        **rank.facts,
    )


def _store_facts(store: StoreProcess) -> StoreFacts:
    attempts = {}
    for attempt, held in store.held.items():
        if held.closed:
            continue
        opened, mine = held.opened, {}
        if opened is not None:
            mine = {rank: opened.share_bytes[rank] for rank, node in opened.nodes.items() if node == store.node}
        attempts[attempt] = AttemptFacts(
            purpose=opened.purpose if opened else "",
            generation=opened.generation if opened else -1,
            stop=bool(opened and opened.stop),
            share_bytes=mine,
            peer=opened.peers.get(store.node, "") if opened else "",
            slots={rank: SlotRef(f"/{store.node}/{rank}", 100, rank) for rank in mine},
            reports=dict(held.reports),
            world_size=held.world_size,
            sealed=dict(held.sealed),
            failed=dict(held.failed),
        )
    return StoreFacts(store.node, store.committed, attempts)
