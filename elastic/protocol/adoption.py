"""What a new controller makes of a run that it finds under way. Pure.

Its predecessor was killed at any moment, between any two commands. What is known then: the last record of its state in
the journal, the snapshots whose commit was decided there, and what the living stores and ranks say of themselves. The
ranks train on meanwhile; nothing here stops them that the predecessor would not have stopped.

A commit that was decided is finished. A round that some ranks were told to stage for goes on; one that nobody was told
to stage for is given up, and the ranks go on at once. A generation that was decided and not told to all is told to
all. Who died while nobody looked is lost as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.mesh import Mesh
from elastic.protocol import boundaries, cluster, notices
from elastic.protocol.course import advance
from elastic.protocol.departures import note_incident, placed
from elastic.protocol.membership import ACTIVE, STARTING, UNWOUND, WARM, Member, Node
from elastic.protocol.run_commands import BeginGeneration, EndRoundBeyond, Interrupt, KillMember
from elastic.protocol.run_events import ClusterSeen, Departure, FirstStep, MemberLost, RoundAbandoned, StoreLost
from elastic.protocol.run_state import (
    FINISHING,
    FORMING,
    GATHERING,
    RUNNING,
    STOPPING,
    UNWINDING,
    Outcome,
    RunState,
    remaining,
)
from elastic.protocol.shares import ShareReport, SlotRef
from elastic.protocol.snapshot_round import COMMITTED, LIVE, SEALING, RoundState, ShareSealed
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot, RestoreOrder

LOST = "it was lost while the run had no controller"
NOT_FINISHED = "its controller was lost"
_LEFT_AT_ITS_BOUNDARY = ("interrupted", "finished")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a living rank says of itself, of the last generation that it was told to begin."""

    member: str
    node: str
    warm: bool
    """It has loaded what it needs."""
    generation: int = -1
    ranks: tuple[str, ...] = ()
    """Of that generation; empty where it was in none."""
    mesh: Mesh | None = None
    restoring: RestoreOrder | None = None
    interrupted: int = -1
    """The newest generation that it was told to leave."""
    entered: int | None = None
    """The step of its first boundary."""
    share_bytes: int = 0
    stepped: bool = False
    """It finished a step of the generation."""
    at_end: int | None = None
    holding: bool = False
    """It waits at its first or last boundary for the snapshot there."""
    ordered: str = ""
    """The attempt that it has accepted and not begun to stage, for the boundary ``ordered_step``."""
    ordered_step: int = -1
    confirmed: bool = False
    """It was told to stage ``ordered``."""
    staged: str = ""
    """The last attempt that it began to stage, at ``staged_step``."""
    staged_step: int = -1
    live: str = ""
    """The attempt for which it was told to stage what it kept."""
    doubtful: int | None = None
    """The last step that it called into doubt."""
    departure: Departure | None = None

    @property
    def holds_entry(self) -> bool:
        return self.holding and self.at_end is None

    @property
    def holds_end(self) -> bool:
        return self.holding and self.at_end is not None

    def begun(self, attempt: str) -> bool:
        """Whether it was told to stage for the attempt."""
        return attempt in (self.staged, self.live) or (self.ordered == attempt and self.confirmed)


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """What a store says of one attempt of which it holds a part."""

    purpose: str = ""
    """Of the round, as it was opened here; empty where only replicas are held."""
    generation: int = -1
    stop: bool = False
    share_bytes: Mapping[int, int] = field(default_factory=dict)
    """Of the ranks on this node."""
    peer: str = ""
    slots: Mapping[int, SlotRef] = field(default_factory=dict)
    reports: Mapping[int, ShareReport] = field(default_factory=dict)
    """Of all shares that are held here, own and replicas."""
    world_size: int = 0
    """Shares that the attempt has; 0 where none is held yet."""
    sealed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Own shares that are sealed and replicated, with the nodes that hold them."""
    failed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a living store says of itself."""

    node: str
    committed: str = ""
    attempts: Mapping[str, AttemptFacts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a new controller could learn."""

    record: RunState
    """See ``run_record.state_of``."""
    decided: frozenset[str]
    """Attempts whose commit is in the journal."""
    view: Mapping[str, tuple[int, str]]
    """See ``ClusterSeen``."""
    stores: Mapping[str, StoreFacts]
    ranks: Mapping[str, RankFacts]
    remotes: tuple[RemoteSnapshot, ...] = ()
    """What durable storage holds of this run, newest first."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """What the run is, and what is to be done, in this order."""

    state: RunState
    committed: RoundState | None
    """The newest snapshot in node memory: every store is told of its commit (again)."""
    given_up: tuple[str, ...]
    """Attempts of which ranks and stores let go."""
    round: RoundState | None
    """The round that goes on: ranks are told to stage (again)."""
    sealed: tuple[ShareSealed, ...]
    """What that round hears first."""
    commands: tuple[Any, ...]
    doubts: tuple[tuple[str, int], ...]
    """Members and the steps that they called into doubt, to be cleared up."""


def adopt(facts: Facts, at: float) -> Adopted:
    """Go on from ``facts``. Asked twice of the same facts it answers the same."""
    state, strays, dead = _members(_generation(facts), facts)
    committed = _committed(facts)
    if committed is not None:
        state = _with_snapshot(state, committed, at)
    known = {rank: facts.ranks[name] for rank, name in enumerate(state.ranks) if name in facts.ranks}
    told = {rank: own for rank, own in known.items() if own.generation == state.generation}
    going: RoundState | None = None
    sealed: tuple[ShareSealed, ...] = ()
    commands: list[Any] = [KillMember(name, "it belongs to a generation that is over") for name in strays]
    broken = ""
    if state.phase != GATHERING:
        state, more = _with_news(state, told, at)
        commands += more
        going, sealed, broken = _open_round(state, facts, told, committed, some_dead=bool(dead))
        state, broken = _phase(state, told, going, committed, broken, at)
        state, more = _orders(state, known, going, at)
        commands += more
    state = notices.again(state, at)
    for step in _losses(state, facts, dead, told, at):
        state, more = step(state)
        commands += more
    if broken:
        state, more = boundaries.round_abandoned(
            replace(state, round_open=broken), RoundAbandoned(at, state.generation, broken, NOT_FINISHED)
        )
        commands += more
    state, more = advance(state, at)
    ends = {attempt for store in facts.stores.values() for attempt in store.attempts}
    ends |= {own.ordered for own in known.values() if own.ordered}
    ends -= {going.attempt if going else "", committed.attempt if committed else ""}
    doubts = [(own.member, own.doubtful) for own in told.values() if own.doubtful is not None and not own.departure]
    return Adopted(state, committed, tuple(sorted(ends)), going, sealed, (*commands, *more), tuple(doubts))


def _generation(facts: Facts) -> RunState:
    """The newest generation that was decided, or that a rank was told of while the journal could not be written."""
    known = {snapshot.attempt: snapshot for snapshot in facts.record.remotes}
    there = {snapshot.attempt for snapshot in facts.remotes}
    elsewhere = [snapshot for snapshot in facts.record.remotes if snapshot.run and snapshot.attempt not in there]
    here = [known.get(found.attempt, replace(found, earlier=False)) for found in facts.remotes]
    state = replace(facts.record, remotes=(*here, *elsewhere))
    newest = max(facts.ranks.values(), key=lambda own: own.generation, default=None)
    if newest is not None and newest.generation > state.generation and newest.ranks:
        state = replace(
            state,
            phase=FORMING,
            generation=newest.generation,
            ranks=newest.ranks,
            mesh=newest.mesh,
            restoring=newest.restoring,
        )
    return replace(state, phase=FORMING if state.ranks and state.phase != GATHERING else GATHERING)


def _members(state: RunState, facts: Facts) -> tuple[RunState, list[str], list[str]]:
    """Nodes and members; who is still in a generation that is over, and who died."""
    settled = state.phase == GATHERING
    members: dict[str, Member] = {}
    strays: list[str] = []
    dead: list[str] = []
    for name, own in facts.ranks.items():
        active = name in state.ranks and not settled
        if not own.warm:
            phase = STARTING
        elif active and own.generation == state.generation and own.departure is not None:
            phase = UNWOUND
        elif active:
            phase = ACTIVE
        elif own.generation < 0 or own.departure is not None:
            phase = WARM
        else:
            strays.append(name)
            continue
        members[name] = Member(name, own.node, phase)
    if not settled:
        dead = [name for name in state.ranks if name not in members]
        for name in dead:
            members[name] = Member(name, state.members[name].node if name in state.members else "", ACTIVE)
    carrying = {member.node for member in members.values()} | set(facts.stores)
    nodes: dict[str, Node] = {}
    for name in sorted({*facts.view, *carrying} - {""}):
        former = state.nodes.get(name) or Node(name, 0)
        capacity, domain = facts.view.get(name, (former.capacity, former.domain))
        store = former.store if former.store == "refused" else "ready" if name in carrying else ""
        nodes[name] = replace(former, capacity=capacity, domain=domain, store=store)
    made = max([state.members_made, *(int(name[1:]) + 1 for name in {*members, *state.ranks, *facts.ranks})])
    return replace(state, nodes=nodes, members=members, members_made=made), strays, dead


def _committed(facts: Facts) -> RoundState | None:
    """The newest attempt that some store has committed, or whose commit was decided, with who holds its shares."""
    candidates: dict[str, tuple[int, int]] = {}
    for store in facts.stores.values():
        for attempt, found in store.attempts.items():
            if found.reports and (attempt == store.committed or attempt in facts.decided):
                point = next(iter(found.reports.values())).point
                candidates[attempt] = (point.generation, point.step)
    if not candidates:
        return None
    attempt = max(candidates, key=lambda name: (candidates[name], name))
    holders = {n: store.attempts[attempt] for n, store in sorted(facts.stores.items()) if attempt in store.attempts}
    opened = _opened(facts, attempt)
    world = max(found.world_size for found in holders.values())
    reports = {rank: report for found in holders.values() for rank, report in found.reports.items()}
    places: dict[int, tuple[str, ...]] = {}
    for rank in range(world):
        owner = opened.nodes.get(rank, "") if opened else ""
        where = [n for n, found in holders.items() if rank in found.reports and n in facts.view]
        places[rank] = tuple(sorted(where, key=lambda n: (n != owner, n)))
    generation, step = candidates[attempt]
    begun = opened or RoundState(attempt, "", generation, False, dict.fromkeys(range(world), ""), {}, {})
    return replace(begun, step=step, phase=COMMITTED, confirmed=True, reports=reports, places=places)


def _with_snapshot(state: RunState, committed: RoundState, at: float) -> RunState:
    snapshot = NodeSnapshot(committed.attempt, committed.step, committed.places, live=committed.purpose == LIVE)
    began = state.restoring.step if state.restoring else 0
    this = committed.generation == state.generation and state.phase != GATHERING
    if this and committed.step > began and committed.purpose != "entry":
        state = boundaries.progress(state, committed.step, at)
    return replace(state, node_snapshots=(snapshot,))


def _with_news(state: RunState, told: Mapping[int, RankFacts], at: float) -> Outcome:
    """What the ranks of the generation have said so far, heard or not."""
    commands: tuple[Any, ...] = ()
    incident = state.incident
    if incident is not None and incident.new_generation == state.generation:
        for own in told.values():
            if own.entered is not None:
                incident = incident.formed(at, 0.0).entered(at, own.entered)
        state = replace(state, incident=incident)
    state = replace(
        state,
        entered={rank: own.share_bytes for rank, own in told.items() if own.entered is not None},
        at_end={rank: own.at_end for rank, own in told.items() if own.at_end is not None},
        departures={
            rank: placed(replace(own.departure, rank=rank, at=at), own.node)
            for rank, own in told.items()
            if own.departure
        },
    )
    for own in told.values():
        if own.stepped or own.at_end is not None:
            state, more = boundaries.first_step(state, FirstStep(at, own.member, state.generation, 0))
            commands += more
    for departure in state.departures.values():
        if departure.cause != "finished":
            state = note_incident(state, departure, "error")
    return state, commands


def _open_round(
    state: RunState,
    facts: Facts,
    told: Mapping[int, RankFacts],
    committed: RoundState | None,
    *,
    some_dead: bool,
) -> tuple[RoundState | None, tuple[ShareSealed, ...], str]:
    """The round that goes on, with what it hears first; or the purpose of one that some ranks have begun to stage for
    and that cannot go on."""
    broken = ""
    for attempt in sorted({attempt for store in facts.stores.values() for attempt in store.attempts}):
        opened = _opened(facts, attempt)
        if opened is None or opened.generation != state.generation or (committed and attempt == committed.attempt):
            continue
        if not any(own.begun(attempt) for own in told.values()):
            continue
        parts = [store.attempts[attempt] for store in facts.stores.values() if attempt in store.attempts]
        slots = {rank: slot for part in parts for rank, slot in part.slots.items()}
        whole = set(opened.nodes) == set(slots) and not any(part.failed for part in parts)
        if opened.purpose == LIVE:
            whole &= [opened.nodes[place] for place in sorted(opened.nodes)] == [told[r].node for r in _kept(state)]
        else:
            whole &= not some_dead and set(opened.nodes) == set(told) == set(range(len(state.ranks)))
            whole &= all(_stages(own, attempt, state.generation) for own in told.values())
        if not whole:
            broken = opened.purpose
            continue
        heard = [
            ShareSealed(part.reports[rank], places)
            for part in parts
            for rank, places in sorted(part.sealed.items())
            if rank in part.reports
        ]
        steps = [own.staged_step if own.staged == attempt else own.ordered_step for own in told.values()]
        if opened.purpose == LIVE:
            steps = [state.departures[rank].step for rank in _kept(state)]
        return replace(opened, phase=SEALING, confirmed=True, slots=slots, step=max(steps)), tuple(heard), ""
    return None, (), broken


def _opened(facts: Facts, attempt: str) -> RoundState | None:
    """The round as it was opened, put together from what the stores were told; None where none that was lives."""
    parts = {n: store.attempts[attempt] for n, store in facts.stores.items() if attempt in store.attempts}
    parts = {n: part for n, part in parts.items() if part.purpose}
    if not parts:
        return None
    first = next(iter(parts.values()))
    return RoundState(
        attempt,
        first.purpose,
        first.generation,
        first.stop,
        nodes={rank: n for n, part in parts.items() for rank in part.share_bytes},
        peers={n: part.peer for n, part in parts.items() if part.peer},
        share_bytes={rank: nbytes for part in parts.values() for rank, nbytes in part.share_bytes.items()},
    )


def _stages(own: RankFacts, attempt: str, generation: int) -> bool:
    """Whether the rank has staged for the attempt, or will when it is told to."""
    left = own.departure is None or own.departure.cause in _LEFT_AT_ITS_BOUNDARY
    return attempt in (own.staged, own.ordered) and left and own.interrupted < generation


def _kept(state: RunState) -> tuple[int, ...]:
    """The ranks that kept the newest boundary; see ``departures``."""
    kept = [d for d in state.departures.values() if d.live_bytes]
    step = max((d.step for d in kept), default=-1)
    return tuple(sorted(d.rank for d in kept if d.step == step))


def _phase(
    state: RunState,
    told: Mapping[int, RankFacts],
    going: RoundState | None,
    committed: RoundState | None,
    broken: str,
    at: float,
) -> tuple[RunState, str]:
    """Where the generation stands; and the purpose of a round whose end the run has to hear of."""
    limits, generation = state.limits, state.generation
    taken = committed is not None and committed.generation == generation
    if going is not None:
        state = replace(state, round_open=going.purpose)
    if going is not None and going.purpose == LIVE:
        state = replace(state, salvage=_kept(state)).due("seal", at + limits.form_timeout_s)
    elif broken == LIVE or any(own.live for own in told.values()):
        state, broken = replace(state, salvage=()), ""  # what was kept was let go of when it was staged
    left = any(d.cause != "finished" for d in state.departures.values())
    if left or any(own.interrupted >= generation for own in told.values()):
        return replace(state, phase=UNWINDING), broken
    if going is not None and going.stop:
        return replace(state, phase=STOPPING), broken
    if len(state.entered) < len(state.ranks) and len(told) == len(state.ranks):
        return replace(state, phase=FORMING).due("form", at + limits.form_timeout_s), broken
    if len(state.entered) < len(state.ranks):
        return state.due("form", at + limits.form_timeout_s), broken
    state = replace(state, phase=RUNNING)
    if any(d.rank not in state.at_end for d in state.departures.values()) and remaining(state):
        state = state.due("return", at + limits.unwind_timeout_s)
    if going is not None or broken:
        due = going is not None and going.purpose == "entry"
        return replace(state, first_round_due=due), broken
    entry = sum(own.holds_entry for own in told.values())
    if state.restoring is None and not taken and 0 < entry < len(told):
        return state, "entry"
    state = replace(state, first_round_due=entry > 0 or (state.restoring is not None and not taken))
    if len(state.at_end) == len(state.ranks):
        held = sum(own.holds_end for own in told.values())
        if not held and committed is not None and taken and committed.step >= max(state.at_end.values()):
            return replace(state, phase=FINISHING), ""
        if held < len(told):
            return state, "final"
    return state, ""


def _orders(state: RunState, known: Mapping[int, RankFacts], going: RoundState | None, at: float) -> Outcome:
    """What the predecessor may have left unsaid to ranks; to hear it twice changes nothing for them."""
    commands: list[Any] = []
    if any(own.generation < state.generation for own in known.values()) and state.mesh is not None:
        restore, reason = state.restoring, "told again by a new controller"
        commands.append(
            BeginGeneration(state.generation, state.ranks, state.mesh, restore, hold=restore is None, reason=reason)
        )
    if state.phase == UNWINDING and remaining(state):
        stays = going is not None and going.stop  # some left at the boundary of a stop, the others are on their way
        state = state if stays else state.due("unwind", at + state.limits.unwind_timeout_s)
        commands += [] if stays else [Interrupt(remaining(state), state.generation)]
    at_end = len(state.at_end) == len(state.ranks)
    if going is not None and at_end and going.purpose not in ("final", LIVE):
        commands.append(EndRoundBeyond(max(state.at_end.values())))
    return state, tuple(commands)


def _losses(state: RunState, facts: Facts, dead: list[str], told: Mapping[int, RankFacts], at: float) -> list[Any]:
    """Steps that take out of the run what is no longer there."""
    furthest = max([-1, *(own.at_end or own.entered or -1 for own in told.values())])
    gone = [name for name, node in state.nodes.items() if node.store_ready and name not in facts.stores]
    steps: list[Any] = [lambda s, n=name: cluster.store_lost(s, StoreLost(at, n, LOST)) for name in gone]
    steps.append(lambda s: cluster.cluster_seen(s, ClusterSeen(at, facts.view)))

    def lose(name: str) -> Any:
        event = MemberLost(at, name, LOST, furthest)
        return lambda s: cluster.member_lost(s, event)

    return [*steps, *(lose(name) for name in dead)]
