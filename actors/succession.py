"""How a controller takes over from one that was killed: learns, claims its office, finishes what was decided, goes on.

What is to be done is decided by ``elastic.protocol.adoption``; training goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from actors.adoption import Living, ask_the_living, keep_in_the_run
from actors.cluster_view import cluster_view
from actors.resume import Durable, Predecessor, predecessor, what_is_durable
from actors.rounds import commit_everywhere
from actors.watch import kill
from elastic.clock import now, wall
from elastic.errors import CorruptSnapshot, SnapshotError
from elastic.journal import error_of
from elastic.observe.history import journal_records
from elastic.protocol import run_lifecycle as life
from elastic.protocol.adoption import Adopted, Facts, adopt
from elastic.protocol.machine import Machine
from elastic.protocol.membership import STARTING
from elastic.protocol.run_record import state_of
from elastic.protocol.run_state import RunState
from elastic.protocol.snapshot_round import LIVE
from elastic.snapshot.reader import SnapshotCatalog

if TYPE_CHECKING:
    from actors.controller import Controller

log = logging.getLogger("elastic.succession")

ASK_AGAIN_S = 1.0


async def take_over(controller: Controller) -> None:
    """Go on with the run of a controller that is gone."""
    began = now()
    past, durable = await _read(controller)
    controller.journal.life = past.life or controller.journal.controller
    limits = controller.spec.limits
    record = RunState(limits, target=controller.spec.scaling.max_workers)
    if past.state is not None:
        record = state_of(past.state, limits, past.clock_shift_s)
    epoch = max(past.epoch, durable.epoch) + 1
    if past.ended is not None:
        await controller.take_office(durable.generation, epoch, "adopted")
        await _tell_the_end(controller, past, epoch, record)
        return
    await controller.take_office(max(durable.generation, record.generation), epoch, "adopted")
    living = await ask_the_living(controller.name, epoch, record)
    view = await asyncio.get_running_loop().run_in_executor(None, cluster_view, controller.spec.scaling.resources)
    controller.members.raylets = view.raylets
    facts = Facts(record, past.decided, view.nodes, living.store_facts, living.rank_facts, durable.snapshots)
    adopted = adopt(facts, now())
    log.info("took over in %.3f s: %s", now() - began, adopted.commands)
    controller.machine = Machine("run", life.TABLE, adopted.state)
    controller.journal.generation = adopted.state.generation
    _hold_on_to(controller, living, adopted)
    controller.snapshots.rounds.know(_by_place(controller, adopted), controller.members.stores)
    _account_for(controller, living, adopted)
    await _finish_the_commit(controller, past, adopted)
    _let_go(controller, adopted)
    _go_on_uploading(controller, durable, adopted)
    if adopted.round is not None:
        controller.snapshots.rounds.resume(adopted.round, adopted.sealed)
    await controller.generations.make_rendezvous()
    # Steps that nobody has written down yet are asked for before a new generation makes the ranks forget them.
    controller.observer.noted = controller.journal.metrics_written = past.metrics
    await controller.observer.collect()
    await controller.observer.complete(record, adopted.state)
    if controller.chronicle.decisions(None, record, adopted.state, adopted.commands, controller.journal):
        await controller.journal.flush()
    for command in adopted.commands:
        await controller.perform(command)
    for member, step in adopted.doubts:
        controller.generations.in_doubt(member, adopted.state.generation, step)
    controller.remember(_remember(controller))
    controller.go_on()


async def _read(controller: Controller) -> tuple[Predecessor, Durable]:
    """What is in storage; a storage that does not answer is asked again until it does: training goes on meanwhile."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            try:
                durable = await loop.run_in_executor(None, what_is_durable, controller.store, controller.name)
            except CorruptSnapshot as error:  # every one is in quarantine; the run may still be whole in memory
                log.warning("%s", error)
                durable = Durable((), 0)
            past = await loop.run_in_executor(None, predecessor, controller.store, controller.name, now(), wall())
            return past, durable
        except (SnapshotError, OSError) as error:
            log.warning("cannot take over yet: %s", error)
            await loop.run_in_executor(None, keep_in_the_run, controller.name)
            await asyncio.sleep(ASK_AGAIN_S)


def _hold_on_to(controller: Controller, living: Living, adopted: Adopted) -> None:
    """Watch those that belong to the run; end those that do not."""
    members = controller.members
    for node, (_, following, actor) in living.stores.items():
        known = adopted.state.nodes.get(node)
        if known is not None and known.store_ready:
            members.adopt_store(node, actor, following)
        else:
            kill(actor)
    for name, (_, following, actor) in living.ranks.items():
        member = adopted.state.members.get(name)
        if member is None:
            kill(actor)
        elif member.phase == STARTING:
            members.start_member(name, member.node)
        else:
            members.adopt_member(name, member.node, actor, following)


def _account_for(controller: Controller, living: Living, adopted: Adopted) -> None:
    """What the status tells until the journal is read."""
    state, chronicle = adopted.state, controller.chronicle
    told = [own for own in living.rank_facts.values() if own.generation == state.generation]
    entry = max((own.entered for own in told if own.entered is not None), default=0)
    steps = [own.at_end or own.staged_step for own in told]
    newest = adopted.committed.step if adopted.committed else 0
    chronicle.adopted(state, max([entry, newest, *steps]), entry, now() - (wall() - _began_wall_s(controller)))
    nodes = {member.node for name, member in state.members.items() if name in state.ranks}
    controller.cadence.resized(now(), len(nodes))
    controller.cadence.captured_step = newest


def _began_wall_s(controller: Controller) -> float:
    """When the first controller of this life began: its name says it."""
    return float(controller.journal.life[1:].partition("-")[0])


async def _finish_the_commit(controller: Controller, past: Predecessor, adopted: Adopted) -> None:
    """The newest commit is in the journal, and every store has heard of it."""
    committed = adopted.committed
    if committed is None:
        return
    if committed.attempt not in past.decided:
        await controller.snapshots.before_commit(committed)
    await commit_everywhere(controller.members.stores, committed.attempt)


def _let_go(controller: Controller, adopted: Adopted) -> None:
    """Attempts that nobody goes on with hold up neither ranks nor memory."""
    for attempt in adopted.given_up:
        for rank in controller.members.ranks.values():
            rank.release.remote(adopted.state.generation, attempt)
        for store in controller.members.stores.values():
            store.abandon.remote(attempt)


def _go_on_uploading(controller: Controller, durable: Durable, adopted: Adopted) -> None:
    """The newest snapshot is brought to storage if it is not there; ranks that wait for it wait on."""
    committed = adopted.committed
    if committed is None:
        return
    there = any(snapshot.attempt == committed.attempt for snapshot in durable.snapshots)
    whole = all(committed.places.values())
    if whole:
        controller.snapshots.uploads.adopt(committed, there)
    if there or not whole:
        for rank in controller.members.ranks.values():
            rank.release.remote(committed.generation, committed.attempt)


def _by_place(controller: Controller, adopted: Adopted) -> dict[int, Any]:
    """The ranks of the generation, numbered as the round that goes on numbers them."""
    state, going = adopted.state, adopted.round
    names = list(state.ranks)
    if going is not None and going.purpose == LIVE:
        names = [state.ranks[rank] for rank in state.salvage or ()]
    held = controller.members.ranks
    return {place: held[name] for place, name in enumerate(names) if name in held}


async def _remember(controller: Controller) -> None:
    """Read the whole journal of this life of the run, for the result; it may be long."""

    def read() -> tuple[list[dict[str, Any]], Any]:
        refs = SnapshotCatalog(controller.store, controller.name).list()
        own, life_began = controller.journal.controller, controller.journal.life
        records = journal_records(controller.store, controller.name, [])
        return [r for r in records if life_began <= r["controller"] and r["controller"] != own], refs

    try:
        records, refs = await asyncio.get_running_loop().run_in_executor(None, read)
        controller.chronicle.remember(records, refs, _began_wall_s(controller))
        interval = [record["reason"] for record in records if record["kind"] == "interval"]
        controller.cadence.reasons[:0] = interval
    except Exception:
        log.exception("what the journal tells of earlier controllers is missing from the result")


async def _tell_the_end(controller: Controller, past: Predecessor, epoch: int, record: RunState) -> None:
    """The run had ended: its result is made again, and what is left of it is torn down."""
    assert past.ended is not None
    controller.chronicle.adopted(record, 0, 0, now() - (wall() - _began_wall_s(controller)))
    await _remember(controller)
    ending = life.EndRun(past.ended["status"], past.ended["reason"])
    controller.machine.state = record
    controller.chronicle.ended(ending, error_of(past.ended["error"]), controller.cadence, now())
    living = await ask_the_living(controller.name, epoch, record)
    for node, (_, following, actor) in living.stores.items():
        controller.members.adopt_store(node, actor, following)
    for _, _, actor in living.ranks.values():
        kill(actor)
    await controller.generations.make_rendezvous()
    await controller.tear_down()
