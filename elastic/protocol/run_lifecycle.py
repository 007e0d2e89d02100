"""The life of a run: who trains, in which generation, from which state. Pure.

                       ┌──────────────── too few members ◀──────────────┐
                       ▼                                                │
    start ──▶ GATHERING ──enough──▶ FORMING ──all entered──▶ RUNNING    │
                                      │                       │  │      │
                                      │     grow, resize, stop│  │loss, error
                                      │                       ▼  │      │
                                      │               STOPPING   │      │
                                      │  loss, error      │      │      │
                                      └───────────────┬───┴──────┘      │
                                                      ▼                 │
                                                  UNWINDING ──────next generation
    RUNNING ──all at the end──▶ FINISHING ──durable──▶ ENDED

One number, the generation, only grows: whatever comes from an older one is ignored here and refused by the ranks and
stores. Every loss, error or voluntary stop goes through UNWINDING, where the run waits until each member of the
generation has left its train function or is gone; only then is the next generation chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.errors import ElasticError
from elastic.mesh import Mesh
from elastic.protocol.incident import Incident
from elastic.protocol.machine import Table, ignore
from elastic.protocol.membership import (
    ACTIVE,
    STARTING,
    UNWOUND,
    WARM,
    Member,
    Node,
    choose_mesh,
    order_ranks,
    peer_of,
    place_members,
)
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot, RestoreOrder, newest_restorable

GATHERING, FORMING, RUNNING, STOPPING, UNWINDING = "gathering", "forming", "running", "stopping", "unwinding"
FINISHING, ENDED = "finishing", "ended"

FINAL_TRIES = 3
"""How often the snapshot at the end of the last step is tried again before the run fails for want of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The part of the configuration that decides here."""

    mesh: Mapping[str, int]
    min_workers: int
    max_workers: int
    replicas: int = 1
    max_failures_without_progress: int = 5
    max_user_errors: int = 3
    unwind_timeout_s: float = 10.0
    form_timeout_s: float = 120.0
    wait_for_workers_s: float = 10.0
    wait_for_cluster_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Departure:
    """How one member left the generation's train function, or that it is gone."""

    member: str
    rank: int
    cause: str
    """``interrupted``, ``finished``, ``error``, ``refused`` (ends the run as it is), ``unreadable`` (the snapshot could
    not be restored) or ``lost``."""
    step: int
    at: float
    error: str = ""
    traceback: str = ""
    collateral: bool = False
    """The error only says that a peer went away."""
    failure: ElasticError | None = None
    """For ``refused`` and ``unreadable``: the error itself."""


@dataclass(frozen=True, slots=True)
class RunState:
    """All that decides what the run does next."""

    limits: Limits
    phase: str = GATHERING
    generation: int = 0
    target: int = 0
    """Ranks that are wanted now: the maximum, unless the user asked for fewer."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    members: Mapping[str, Member] = field(default_factory=dict)
    members_made: int = 0
    ranks: tuple[str, ...] = ()
    """Members of the current or last generation, by rank."""
    mesh: Mesh | None = None
    entered: Mapping[int, int] = field(default_factory=dict)
    """Share bytes of each rank that reached its first boundary."""
    at_end: Mapping[int, int] = field(default_factory=dict)
    """The step of each rank that reached the end of its steps."""
    departures: Mapping[int, Departure] = field(default_factory=dict)
    node_snapshots: tuple[NodeSnapshot, ...] = ()
    remotes: tuple[RemoteSnapshot, ...] = ()
    """Committed in durable storage, newest first."""
    restoring: str = ""
    """Attempt that this generation restores from."""
    round_open: str = ""
    """Purpose of the snapshot round that is open, if any."""
    incident: Incident | None = None
    failures_without_progress: int = 0
    user_errors: tuple[tuple[str, int], ...] = ()
    avoid: frozenset[str] = frozenset()
    """Nodes on which a member was lost; used last for new members until a step is committed."""
    stop_asked: bool = False
    deadline: float | None = None
    deadline_for: str = ""
    final_tries: int = 0
    ending: EndRun | None = None

    def member_of(self, rank: int) -> Member | None:
        return self.members.get(self.ranks[rank])

    def rank_of(self, member: str) -> int | None:
        return self.ranks.index(member) if member in self.ranks else None


# --- events: each carries ``at``, seconds on the controller's clock --------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """The nodes that are alive, with how many ranks of this run each can carry."""

    at: float
    nodes: Mapping[str, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class StoreReady:
    at: float
    node: str


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The node's store is gone: so is its memory, and its ranks are not to be trusted with staging."""

    at: float
    node: str
    why: str


@dataclass(frozen=True, slots=True)
class MemberReady:
    at: float
    member: str


@dataclass(frozen=True, slots=True)
class EntryFailed:
    """The user's code could not be loaded on a member: it could not be on any other."""

    at: float
    member: str
    error: str
    traceback: str
    failure: ElasticError | None = None


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """A node cannot take part, by name: another version of Python, torch or ours."""

    at: float
    node: str
    error: ElasticError


@dataclass(frozen=True, slots=True)
class MemberLost:
    at: float
    member: str
    why: str
    step: int = -1


@dataclass(frozen=True, slots=True)
class Formed:
    """A rank's process group stands."""

    at: float
    member: str
    generation: int
    took_s: float = 0.0
    """Seconds since the rank was told to begin."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A rank restored, or had nothing to restore, and stands at its first boundary."""

    at: float
    member: str
    generation: int
    step: int
    share_bytes: int


@dataclass(frozen=True, slots=True)
class FirstStep:
    """A rank finished its first step of the generation."""

    at: float
    member: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class AtEnd:
    """A rank finished its last step and waits for the final snapshot."""

    at: float
    member: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Departed:
    """A rank left the train function."""

    at: float
    generation: int
    departure: Departure


@dataclass(frozen=True, slots=True)
class NodeCommitted:
    """A snapshot round committed in node memory."""

    at: float
    generation: int
    snapshot: NodeSnapshot
    purpose: str


@dataclass(frozen=True, slots=True)
class RoundAbandoned:
    at: float
    generation: int
    purpose: str
    reason: str


@dataclass(frozen=True, slots=True)
class RemoteCommitted:
    at: float
    snapshot: RemoteSnapshot


@dataclass(frozen=True, slots=True)
class UploadsIdle:
    """No upload is in flight and none is due: what was to become durable is, or has failed with ``reason``."""

    at: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotDue:
    at: float


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    at: float
    workers: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline of the state may have passed."""

    at: float


# --- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartStore:
    node: str


@dataclass(frozen=True, slots=True)
class StartMember:
    member: str
    node: str


@dataclass(frozen=True, slots=True)
class KillMember:
    member: str
    why: str


@dataclass(frozen=True, slots=True)
class BeginGeneration:
    """To every rank: form the group of this generation and enter the train function."""

    generation: int
    ranks: tuple[str, ...]
    mesh: Mesh
    restore: RestoreOrder | None
    hold: bool
    """Wait at the first boundary for the snapshot of step 0: there is nothing else to come back to."""
    reason: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """To these members: leave the train function at the next chance."""

    members: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Peers report broken connections: find out which of these members still answer."""

    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartRound:
    """Open a snapshot round; with ``stop`` the generation ends at its boundary."""

    purpose: str
    stop: bool


@dataclass(frozen=True, slots=True)
class CancelRound:
    reason: str


@dataclass(frozen=True, slots=True)
class EndRoundBeyond:
    """Every rank is at its end: give up an open round whose step lies beyond ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class CloseIncident:
    incident: Incident


@dataclass(frozen=True, slots=True)
class MakeDurable:
    """Upload the newest node snapshot and answer with UploadsIdle when nothing is in flight."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run is over. ``status``: finished, stopped or failed."""

    status: str
    reason: str
    departure: Departure | None = None
    deterministic: bool = False
    kind: str = ""
    """For failed: ``user``, ``refused``, ``cluster``."""


Outcome = tuple[RunState, tuple[Any, ...]]


# --- the cluster: legal in every phase -------------------------------------------------------------------------------


def _cluster_seen(state: RunState, event: ClusterSeen) -> Outcome:
    nodes = dict(state.nodes)
    commands: list[Any] = []
    for name, (capacity, domain) in event.nodes.items():
        if name not in nodes:
            nodes[name] = Node(name, capacity, domain=domain)
            if capacity > 0:
                commands.append(StartStore(name))
        else:
            nodes[name] = replace(nodes[name], capacity=capacity)
    state = replace(state, nodes=nodes)
    gone = [name for name in nodes if name not in event.nodes]
    for name in gone:
        state, more = _store_lost(state, StoreLost(event.at, name, "the node left the cluster"))
        commands += more
    state, more = _fill(state, event.at)
    return state, (*commands, *more)


def _store_ready(state: RunState, event: StoreReady) -> Outcome:
    if event.node not in state.nodes:
        return state, ()
    nodes = {**state.nodes, event.node: replace(state.nodes[event.node], store_ready=True)}
    return _fill(replace(state, nodes=nodes), event.at)


def _store_lost(state: RunState, event: StoreLost) -> Outcome:
    if event.node not in state.nodes:
        return state, ()
    nodes = {name: node for name, node in state.nodes.items() if name != event.node}
    kept = tuple(snapshot.without(event.node) for snapshot in state.node_snapshots)
    state = replace(state, nodes=nodes, node_snapshots=kept)
    commands: list[Any] = []
    for member in [m for m in state.members.values() if m.node == event.node]:
        state, more = _lose(state, member.name, event.at, event.why, kind="node", step=-1)
        commands += [KillMember(member.name, event.why), *more]
    state, more = _settle(state, event.at)
    return state, (*commands, *more)


def _member_ready(state: RunState, event: MemberReady) -> Outcome:
    member = state.members.get(event.member)
    if member is None or member.phase != STARTING:
        return state, ()
    state = replace(state, members={**state.members, member.name: replace(member, phase=WARM)})
    return _fill(state, event.at)


def _entry_failed(state: RunState, event: EntryFailed) -> Outcome:
    departure = Departure(event.member, 0, "error", -1, event.at, event.error, event.traceback, failure=event.failure)
    return _end(state, EndRun("failed", event.error, departure, kind="refused" if event.failure else "user"))


def _node_refused(state: RunState, event: NodeRefused) -> Outcome:
    """At the start the run ends, so that the user hears of it; later the node is only left alone."""
    if not state.ranks:
        departure = Departure("", 0, "refused", -1, event.at, str(event.error), failure=event.error)
        return _end(state, EndRun("failed", str(event.error), departure, kind="refused"))
    nodes = (
        {**state.nodes, event.node: replace(state.nodes[event.node], capacity=0)} if event.node in state.nodes else {}
    )
    return replace(state, nodes=nodes or state.nodes), ()


def _member_lost(state: RunState, event: MemberLost) -> Outcome:
    if event.member not in state.members:
        return state, ()
    state, commands = _lose(state, event.member, event.at, event.why, kind="rank", step=event.step)
    state, more = _settle(state, event.at)
    return state, (*commands, *more)


def _lose(state: RunState, name: str, at: float, why: str, *, kind: str, step: int) -> Outcome:
    """Take ``name`` out of the run; if it is in the living generation, that generation ends."""
    member = state.members[name]
    members = {other: m for other, m in state.members.items() if other != name}
    state = replace(state, members=members, avoid=state.avoid | {member.node})
    rank = state.rank_of(name)
    if rank is None or state.phase in (GATHERING, ENDED) or state.departures.get(rank):
        return state, ()
    return _depart(state, Departure(name, rank, "lost", step, at, error=why), kind)


# --- forming and running ---------------------------------------------------------------------------------------------


def _of_this_generation(state: RunState, event: Any) -> int | None:
    return state.rank_of(event.member) if event.generation == state.generation else None


def _formed(state: RunState, event: Formed) -> Outcome:
    if _of_this_generation(state, event) is None or state.incident is None:
        return state, ()
    return replace(state, incident=state.incident.formed(event.at, event.took_s)), ()


def _entered(state: RunState, event: Entered) -> Outcome:
    rank = _of_this_generation(state, event)
    if rank is None:
        return state, ()
    incident = state.incident.entered(event.at, event.step) if state.incident else None
    state = replace(state, entered={**state.entered, rank: event.share_bytes}, incident=incident)
    if len(state.entered) < len(state.ranks):
        return state, ()
    state = replace(state, phase=RUNNING, deadline=None, deadline_for="")
    has_snapshot = newest_restorable(state.node_snapshots, state.remotes) is not None
    state = replace(state, round_open="redundancy" if has_snapshot else "entry")
    state, more = _fill(state, event.at)
    return state, (StartRound(state.round_open, stop=False), *more)


def _first_step(state: RunState, event: FirstStep) -> Outcome:
    if _of_this_generation(state, event) is None or state.incident is None:
        return state, ()
    incident = state.incident.first_step(event.at)
    return replace(state, incident=None), (CloseIncident(incident),)


def _snapshot_due(state: RunState, event: SnapshotDue) -> Outcome:
    if state.round_open:
        return state, ()
    return replace(state, round_open="periodic"), (StartRound("periodic", stop=False),)


def _at_end(state: RunState, event: AtEnd) -> Outcome:
    rank = _of_this_generation(state, event)
    if rank is None:
        return state, ()
    state = replace(state, at_end={**state.at_end, rank: event.step})
    return _maybe_final(state)


def _maybe_final(state: RunState) -> Outcome:
    """Once every rank stands at the end, one last snapshot; a round that is open is waited for first."""
    if len(state.at_end) < len(state.ranks):
        return state, ()
    if state.round_open:
        return state, () if state.round_open == "final" else (EndRoundBeyond(max(state.at_end.values())),)
    return replace(state, round_open="final"), (StartRound("final", stop=False),)


def _node_committed(state: RunState, event: NodeCommitted) -> Outcome:
    kept = tuple(s for s in state.node_snapshots if s.step > event.snapshot.step)
    progressed = all(s.step < event.snapshot.step for s in state.node_snapshots) and event.purpose != "entry"
    state = replace(state, node_snapshots=(*kept, event.snapshot))
    if progressed and event.purpose != "redundancy":
        state = replace(state, failures_without_progress=0, avoid=frozenset())
    if event.generation != state.generation:
        return state, ()
    return _after_round(replace(state, round_open=""), event.at, event.purpose, "")


def _round_abandoned(state: RunState, event: RoundAbandoned) -> Outcome:
    if event.generation != state.generation:
        return state, ()
    return _after_round(replace(state, round_open=""), event.at, event.purpose, event.reason)


def _after_round(state: RunState, at: float, purpose: str, failed: str) -> Outcome:
    """What a round's end leads to; ``failed`` is why it did not commit, empty where it did."""
    if state.phase == UNWINDING:
        return _settle(state, at)
    if state.phase == STOPPING and failed:
        # The ranks were released and train on; what wanted the stop is asked again below.
        state = replace(state, phase=RUNNING, deadline=None, deadline_for="")
    if purpose == "entry" and failed:
        return _end(state, EndRun("failed", f"the snapshot of the first step was not taken: {failed}", kind="snapshot"))
    if purpose == "final":
        if not failed:
            return _settle(replace(state, phase=FINISHING), at)
        if state.departures or state.final_tries >= FINAL_TRIES:
            return _end(state, EndRun("failed", f"the last snapshot was not taken: {failed}", kind="snapshot"))
        state = replace(state, final_tries=state.final_tries + 1)
    state, commands = _maybe_final(state)
    if commands:
        return state, commands
    return _fill(state, at)


def _remote_committed(state: RunState, event: RemoteCommitted) -> Outcome:
    remotes = sorted((event.snapshot, *state.remotes), key=lambda snapshot: -snapshot.step)
    return replace(state, remotes=tuple(remotes[:16])), ()


# --- voluntary stops -------------------------------------------------------------------------------------------------


def _resize_asked(state: RunState, event: ResizeAsked) -> Outcome:
    limits = state.limits
    target = max(limits.min_workers, min(limits.max_workers, event.workers))
    return _fill(replace(state, target=target), event.at)


def _stop_asked(state: RunState, event: StopAsked) -> Outcome:
    state = replace(state, stop_asked=True)
    if state.phase == GATHERING:
        return _end(state, EndRun("stopped", "stopped as asked"))
    return _fill(state, event.at)


def _fill(state: RunState, at: float) -> Outcome:
    """Start members that are missing, kill what is too many, and stop the generation where a better one is possible."""
    if state.phase in (FINISHING, ENDED) or state.ending:
        return state, ()
    commands: list[Any] = []
    living = len(state.members)
    if living < state.target and not state.stop_asked:
        chosen = place_members(state.nodes.values(), state.members.values(), state.target - living, state.avoid)
        for node in chosen:
            name = f"m{state.members_made:04d}"
            state = replace(
                state,
                members_made=state.members_made + 1,
                members={**state.members, name: Member(name, node)},
            )
            commands.append(StartMember(name, node))
    if state.phase == GATHERING:
        state, more = _maybe_begin(state, at)
        return state, (*commands, *more)
    if state.phase == RUNNING and not state.round_open and not state.at_end:
        purpose = _better_generation(state, at)
        if purpose:
            state = replace(state, phase=STOPPING, round_open=purpose)
            return state, (*commands, StartRound(purpose, stop=True))
    return state, tuple(commands)


def _better_generation(state: RunState, at: float) -> str:
    """The purpose of a stop that leads to a better generation, or nothing."""
    if state.stop_asked:
        return "stop"
    if any(member.phase == STARTING for member in state.members.values()):
        return ""
    limits = state.limits
    mesh, _ = choose_mesh(limits.mesh, limits.min_workers, state.target, len(state.members))
    if mesh is None or mesh == state.mesh:
        return ""
    return "grow" if mesh.world_size > len(state.ranks) else "shrink"


# --- leaving a generation --------------------------------------------------------------------------------------------


def _departed(state: RunState, event: Departed) -> Outcome:
    departure = event.departure
    if event.generation != state.generation or state.rank_of(departure.member) != departure.rank:
        return state, ()
    if departure.rank in state.departures or departure.member not in state.members:
        return state, ()
    member = state.members[departure.member]
    state = replace(state, members={**state.members, member.name: replace(member, phase=UNWOUND)})
    state, commands = _depart(state, departure, "error")
    state, more = _settle(state, event.at)
    return state, (*commands, *more)


def _depart(state: RunState, departure: Departure, kind: str) -> Outcome:
    """Note how a rank left. The first that leaves unasked opens an incident and ends the generation for all."""
    state = replace(state, departures={**state.departures, departure.rank: departure})
    if departure.cause == "finished":
        return state, ()
    if departure.cause == "interrupted" and state.phase in (STOPPING, UNWINDING):
        return replace(state, phase=UNWINDING, **_unwind_deadline(state, departure.at)), ()
    incident = state.incident
    if departure.cause in ("lost", "error", "unreadable"):
        fresh = incident or Incident.opened(
            kind=kind,
            generation=state.generation,
            world_size=len(state.ranks),
            at=departure.at,
            why=departure.error,
            step=departure.step,
        )
        incident = fresh.also(kind, departure.step, departure.error if departure.cause == "lost" else "")
    already = state.phase == UNWINDING
    state = replace(state, phase=UNWINDING, incident=incident)
    remaining = _remaining(state)
    commands: list[Any] = []
    if not already:
        state = replace(state, **_unwind_deadline(state, departure.at))
        if state.round_open:
            commands.append(CancelRound(f"the generation ended: {departure.error or departure.cause}"))
        if remaining:
            commands.append(Interrupt(remaining, state.generation))
    if departure.collateral and remaining:
        commands.append(Probe(remaining))
    return state, tuple(commands)


def _remaining(state: RunState) -> tuple[str, ...]:
    """Members of the generation that are neither gone nor out of their train function."""
    return tuple(
        name for rank, name in enumerate(state.ranks) if rank not in state.departures and name in state.members
    )


def _unwind_deadline(state: RunState, at: float) -> dict[str, Any]:
    return {"deadline": at + state.limits.unwind_timeout_s, "deadline_for": "unwind"}


def _settle(state: RunState, at: float) -> Outcome:
    """When everybody is out, decide what comes next."""
    all_out = bool(state.ranks) and len(state.departures) == len(state.ranks)
    if (
        state.phase in (RUNNING, FINISHING)
        and all_out
        and all(d.cause == "finished" for d in state.departures.values())
    ):
        return (state, ()) if state.round_open else _finished(state)
    if state.phase != UNWINDING or _remaining(state):
        return state, ()
    if state.round_open and not any(d.cause in ("lost", "error") for d in state.departures.values()):
        return state, ()  # a voluntary stop: its snapshot is still being sealed
    state = replace(state, deadline=None, deadline_for="", round_open="")
    causes = [state.departures[rank] for rank in sorted(state.departures)]
    if state.incident:
        state = replace(state, incident=state.incident.settled(at))
    refused = next((d for d in causes if d.cause == "refused"), None)
    if refused:
        return _end(state, EndRun("failed", refused.error, refused, kind="refused"))
    unreadable = next((d for d in causes if d.cause == "unreadable"), None)
    if unreadable:
        state = _without_snapshot(state, state.restoring)
        if newest_restorable(state.node_snapshots, state.remotes) is None:
            return _end(state, EndRun("failed", unreadable.error, unreadable, kind="refused"))
    if state.stop_asked and not any(d.cause in ("lost", "error") for d in causes):
        return replace(state, phase=FINISHING, ending=EndRun("stopped", "stopped as asked")), (MakeDurable(),)
    own = sorted((d for d in causes if d.cause == "error" and not d.collateral), key=lambda d: d.at)
    lost = [d for d in causes if d.cause == "lost"]
    if own and not lost:
        state, ended = _user_error(state, own[0])
        if ended:
            return _end(state, ended)
    elif lost or any(d.cause == "error" for d in causes):
        count = state.failures_without_progress + 1
        state = replace(state, failures_without_progress=count)
        if count > state.limits.max_failures_without_progress:
            why = (lost or [d for d in causes if d.error])[0].error
            return _end(
                state,
                EndRun(
                    "failed", f"{count} failures in a row without a committed step, the last: {why}", kind="cluster"
                ),
            )
    state = replace(
        state,
        phase=GATHERING,
        members={name: replace(m, phase=WARM) if m.phase == UNWOUND else m for name, m in state.members.items()},
    )
    return _fill(state, at)


def _user_error(state: RunState, departure: Departure) -> tuple[RunState, EndRun | None]:
    """The user's own error: tried once more, unless it is the same at the same step, or there were too many."""
    signature = (departure.error, departure.step)
    if signature in state.user_errors:
        reason = f"the same error at step {departure.step} twice" if departure.step >= 0 else "the same error twice"
        return state, EndRun("failed", reason, departure, deterministic=True, kind="user")
    state = replace(state, user_errors=(*state.user_errors, signature))
    if len(state.user_errors) >= state.limits.max_user_errors:
        reason = f"{len(state.user_errors)} errors of the train function"
        return state, EndRun("failed", reason, departure, kind="user")
    return state, None


def _maybe_begin(state: RunState, at: float) -> Outcome:
    """Begin the next generation if the ready members can form a mesh, now or when the wait for more is over."""
    limits = state.limits
    ready = [member for member in state.members.values() if member.phase == WARM]
    mesh, reason = choose_mesh(limits.mesh, limits.min_workers, state.target, len(ready))
    if mesh is None:
        if state.deadline_for != "cluster":
            return replace(state, deadline=at + limits.wait_for_cluster_s, deadline_for="cluster"), ()
        if state.deadline is not None and at >= state.deadline:
            reason = f"{reason}; no more came in {limits.wait_for_cluster_s:g} s"
            return _end(state, EndRun("failed", reason, kind="cluster"))
        return state, ()
    if not state.ranks and any(member.phase == STARTING for member in state.members.values()):
        # A start may wait a little for its full size; a recovery never does: the late ones join at a boundary.
        if state.deadline_for != "more":
            return replace(state, deadline=at + limits.wait_for_workers_s, deadline_for="more"), ()
        if state.deadline is not None and at < state.deadline:
            return state, ()
    ranks = order_ranks(state.ranks, ready, mesh.world_size)
    generation = state.generation + 1
    restore = newest_restorable(state.node_snapshots, state.remotes)
    surplus = [member.name for member in ready if member.name not in ranks][: max(0, len(state.members) - state.target)]
    members = {
        name: replace(m, phase=ACTIVE) if name in ranks else m
        for name, m in state.members.items()
        if name not in surplus
    }
    incident = state.incident.begun(at, generation, mesh.world_size) if state.incident else None
    state = replace(
        state,
        phase=FORMING,
        generation=generation,
        ranks=ranks,
        mesh=mesh,
        members=members,
        entered={},
        at_end={},
        departures={},
        incident=incident,
        restoring=restore.attempt if restore else "",
        deadline=at + limits.form_timeout_s,
        deadline_for="form",
    )
    return state, (
        *(KillMember(name, "fewer ranks are wanted") for name in surplus),
        BeginGeneration(generation, ranks, mesh, restore, hold=restore is None, reason=reason),
    )


# --- the end ---------------------------------------------------------------------------------------------------------


def _finished(state: RunState) -> Outcome:
    ending = state.ending or EndRun("finished", "the train function returned on every rank")
    return replace(state, phase=FINISHING, ending=ending), (MakeDurable(),)


def _uploads_idle(state: RunState, event: UploadsIdle) -> Outcome:
    if state.ending is None:
        return state, ()
    ending = replace(
        state.ending, reason=f"{state.ending.reason}; {event.reason}" if event.reason else state.ending.reason
    )
    return _end(state, ending)


def _end(state: RunState, ending: EndRun) -> Outcome:
    """The run is over; whoever performs EndRun ends every process, after the last of their news was heard."""
    return replace(state, phase=ENDED, ending=ending, deadline=None, deadline_for=""), (ending,)


def _tick(state: RunState, event: Tick) -> Outcome:
    if state.deadline is None or event.at < state.deadline:
        return state, ()
    if state.phase == FORMING:
        late = tuple(name for rank, name in enumerate(state.ranks) if rank not in state.entered)
        return _give_up_on(state, event.at, late, "did not reach its first boundary in time")
    if state.phase == UNWINDING:
        if state.round_open and not _remaining(state):
            return replace(state, deadline=None), (CancelRound("its shares were not sealed in time"),)
        return _give_up_on(state, event.at, _remaining(state), "did not leave the train function in time")
    return _fill(state, event.at)


def _give_up_on(state: RunState, at: float, names: tuple[str, ...], why: str) -> Outcome:
    """Kill members that are too slow; they count as lost."""
    state = replace(state, deadline=None, deadline_for="")
    commands: list[Any] = []
    for name in names:
        if name in state.members:
            state, more = _lose(state, name, at, why, kind="hang", step=-1)
            commands += [KillMember(name, why), *more]
    state, more = _settle(state, at)
    return state, (*commands, *more)


def _without_snapshot(state: RunState, attempt: str) -> RunState:
    """The state without a snapshot that could not be restored: it is not offered again."""
    return replace(
        state,
        node_snapshots=tuple(s for s in state.node_snapshots if s.attempt != attempt),
        remotes=tuple(s for s in state.remotes if s.attempt != attempt),
    )


def _resize_later(state: RunState, event: ResizeAsked) -> Outcome:
    limits = state.limits
    return replace(state, target=max(limits.min_workers, min(limits.max_workers, event.workers))), ()


def _stop_later(state: RunState, event: StopAsked) -> Outcome:
    return replace(state, stop_asked=True), ()


_ALL = (GATHERING, FORMING, RUNNING, STOPPING, UNWINDING, FINISHING)
_IN_GENERATION = (FORMING, RUNNING, STOPPING, UNWINDING, FINISHING)

TABLE: Table[RunState] = {
    **{(phase, ClusterSeen): _cluster_seen for phase in _ALL},
    **{(phase, StoreReady): _store_ready for phase in _ALL},
    **{(phase, StoreLost): _store_lost for phase in _ALL},
    **{(phase, MemberReady): _member_ready for phase in _ALL},
    **{(phase, MemberLost): _member_lost for phase in _ALL},
    **{(phase, EntryFailed): _entry_failed for phase in _ALL},
    **{(phase, NodeRefused): _node_refused for phase in _ALL},
    **{(phase, Tick): _tick for phase in _ALL},
    **{(phase, RemoteCommitted): _remote_committed for phase in _ALL},
    **{(phase, NodeCommitted): _node_committed for phase in _ALL},
    **{(phase, RoundAbandoned): _round_abandoned for phase in _ALL},
    **{(phase, UploadsIdle): _uploads_idle for phase in _ALL},
    **{(phase, Departed): _departed for phase in _IN_GENERATION},
    **{(phase, FirstStep): _first_step for phase in _IN_GENERATION},
    (FORMING, Formed): _formed,
    (FORMING, Entered): _entered,
    (RUNNING, SnapshotDue): _snapshot_due,
    (RUNNING, AtEnd): _at_end,
    (STOPPING, AtEnd): _at_end,
    **{(phase, ResizeAsked): _resize_asked for phase in (GATHERING, RUNNING)},
    **{(phase, ResizeAsked): _resize_later for phase in (FORMING, STOPPING, UNWINDING, FINISHING)},
    **{(phase, StopAsked): _stop_asked for phase in (GATHERING, RUNNING)},
    **{(phase, StopAsked): _stop_later for phase in (FORMING, STOPPING, UNWINDING, FINISHING)},
    # What a generation says after it ended says nothing any more.
    **{(phase, late): ignore for phase in (GATHERING, UNWINDING, FINISHING, ENDED) for late in (Formed, Entered, AtEnd)},
    **{(phase, Formed): ignore for phase in (RUNNING, STOPPING)},
    **{(phase, Entered): ignore for phase in (RUNNING, STOPPING)},
    (FORMING, AtEnd): _at_end,
    **{(phase, SnapshotDue): ignore for phase in (GATHERING, FORMING, STOPPING, UNWINDING, FINISHING, ENDED)},
    **{(phase, late): ignore for phase in (GATHERING, ENDED) for late in (Departed, FirstStep)},
    **{
        (ENDED, late): ignore
        for late in (
            ClusterSeen, EntryFailed, NodeRefused, StoreReady, StoreLost, MemberReady, MemberLost, Tick, RemoteCommitted,
            NodeCommitted, RoundAbandoned, UploadsIdle, ResizeAsked, StopAsked,
        )
    },
}  # fmt: skip


def resumed(state: RunState, generation: int, remotes: tuple[RemoteSnapshot, ...]) -> RunState:
    """A fresh state that goes on where storage says the run was."""
    return replace(state, generation=generation, remotes=remotes)


def peers(state: RunState) -> dict[str, str]:
    """For each node of the generation the node that keeps its replica; empty where replicas are off or there is one."""
    if not state.limits.replicas:
        return {}
    used = {member.node for name, member in state.members.items() if name in state.ranks}
    return peer_of([node for name, node in state.nodes.items() if name in used and node.store_ready])
