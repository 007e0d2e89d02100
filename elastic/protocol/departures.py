"""How a generation ends: ranks leave or are lost, and when everybody is out the run decides what comes next. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.errors import CorruptSnapshot
from elastic.protocol import notices
from elastic.protocol.classification import HANG, INFRASTRUCTURE, PREEMPTION, REPEATS, STORAGE, USER
from elastic.protocol.endings import end_run, failed_once_more, finished, released, stopped, user_error
from elastic.protocol.incident import Culprit, Incident
from elastic.protocol.membership import UNWOUND
from elastic.protocol.run_commands import CancelRound, EndRun, Interrupt, KillMember, Probe, Quarantine, StartSalvage
from elastic.protocol.run_events import Departed, Departure
from elastic.protocol.run_state import (
    FINISHING,
    FORMING,
    RUNNING,
    STOPPING,
    UNWINDING,
    Outcome,
    RunState,
    remaining,
)
from elastic.protocol.tiers import newest_restorable

UNREADABLE_TRIES = 2
"""A snapshot that could not be restored so often is not offered again. Once is not enough: a node that is lost while
ranks read from it looks the same as a snapshot that is broken."""

_FAILED = ("lost", "error", "unreadable", "refused")
_IN_GENERATION = (FORMING, RUNNING, STOPPING, UNWINDING, FINISHING)


def departed(state: RunState, event: Departed) -> Outcome:
    """A rank says how it left its train function."""
    departure = event.departure
    if event.generation != state.generation or state.rank_of(departure.member) != departure.rank:
        return state, ()
    if departure.rank in state.departures or departure.member not in state.members:
        return state, ()
    member = state.members[departure.member]
    state = replace(state, members={**state.members, member.name: replace(member, phase=UNWOUND)})
    return depart(state, placed(departure, member.node), "error")


def placed(departure: Departure, node: str) -> Departure:
    """What a rank said of how it left, with what the run knows: its node, and the class where it named none."""
    unclassified = STORAGE if departure.cause == "unreadable" else USER
    return replace(departure, node=node, failure_class=departure.failure_class or unclassified)


def lose(
    state: RunState,
    name: str,
    at: float,
    why: str,
    *,
    kind: str,
    step: int = -1,
    failure_class: str = "",
    traceback: str = "",
    collateral: bool = False,
) -> Outcome:
    """Take ``name`` out of the run; if it is in the living generation, that generation ends."""
    member = state.members[name]
    failure_class = failure_class or (HANG if kind == "hang" else INFRASTRUCTURE)
    if failure_class == INFRASTRUCTURE and member.node in notices.leaving(state):
        failure_class = PREEMPTION
    members = {other: m for other, m in state.members.items() if other != name}
    state = replace(state, members=members, avoid=state.avoid | {member.node})
    rank = state.rank_of(name)
    if state.round_open == "live" and rank in (state.salvage or ()) and not state.round_cancelled:
        return replace(state, round_cancelled=True), (CancelRound(f"a survivor was lost: {why}"),)
    if rank is None or state.phase not in _IN_GENERATION or rank in state.departures:
        return state, ()
    departure = Departure(
        name,
        rank,
        "lost",
        step,
        at,
        error=why,
        traceback=traceback,
        collateral=collateral,
        failure_class=failure_class,
        node=member.node,
    )
    return depart(state, departure, kind)


def depart(state: RunState, departure: Departure, kind: str) -> Outcome:
    """Note how a rank left. The first that leaves unasked ends the generation for all."""
    failing = any(other.cause in _FAILED for other in state.departures.values())
    state = replace(state, departures={**state.departures, departure.rank: departure})
    at, cause, limits = departure.at, departure.cause, state.limits
    if cause == "finished":
        if departure.rank not in state.at_end and remaining(state) and state.phase != UNWINDING:
            state = state.due("return", at + limits.unwind_timeout_s)
        return state, ()
    state = note_incident(state, departure, kind)
    if cause == "interrupted" and state.phase in (STOPPING, UNWINDING):
        state = replace(state, phase=UNWINDING)
        # While the round of the stop is open the others may still be on their way to its boundary.
        return (state if state.round_open else _hurry(state, at)), ()
    commands: list[Any] = []
    if not failing:
        state, more = leave_all(state, at, f"the generation ended: {departure.error or cause}")
        commands += more
    if departure.collateral and remaining(state):
        commands.append(Probe(remaining(state)))
    return state, tuple(commands)


def leave_all(state: RunState, at: float, why: str) -> Outcome:
    """Everybody has to leave: the open round is given up, who is still in is interrupted and has so long for it."""
    commands: list[Any] = []
    if state.round_open:
        commands.append(CancelRound(why))
    rest = remaining(state)
    if rest:
        commands.append(Interrupt(rest, state.generation))
    state = replace(state, phase=UNWINDING, round_cancelled=bool(state.round_open))
    return _hurry(state.undue("form", "retry", "return"), at), tuple(commands)


def _hurry(state: RunState, at: float) -> RunState:
    return state.due("unwind", at + state.limits.unwind_timeout_s) if remaining(state) else state


def note_incident(state: RunState, departure: Departure, kind: str) -> RunState:
    """A failure opens an incident; every departure tells how far its rank had come."""
    incident = state.incident
    if departure.cause in ("lost", "error", "unreadable"):
        culprit = Culprit(departure.rank, departure.node, departure.failure_class, departure.traceback)
        if incident is None:
            incident = Incident.opened(
                kind=kind,
                generation=state.generation,
                world_size=len(state.ranks),
                at=departure.at,
                why=departure.error,
                step=departure.step,
                collateral=departure.collateral,
                culprit=culprit,
            )
        incident = incident.also(
            kind, departure.step, departure.error, collateral=departure.collateral, culprit=culprit
        )
    elif incident is not None:
        incident = incident.reached(departure.step)
    return replace(state, incident=incident)


def give_up_on(state: RunState, at: float, names: tuple[str, ...], why: str) -> Outcome:
    """Kill members that are too slow; they count as lost. Who only does not leave in time is not why it ended."""
    late = state.phase == UNWINDING
    commands: list[Any] = []
    for name in names:
        if name in state.members:
            state, more = lose(state, name, at, why, kind="hang", collateral=late)
            commands += [KillMember(name, why), *more]
    return state, tuple(commands)


def settle(state: RunState, at: float) -> Outcome:
    """When everybody is out and no round is open, decide what comes next."""
    if remaining(state):
        return state, ()
    state = state.undue("unwind", "form", "return")
    if state.round_open:
        # Sealing takes as long as replicas take; it comes to nothing only if a share was lost on its way to the store.
        return state.due("seal", at + state.limits.form_timeout_s), ()
    departures = [state.departures[rank] for rank in sorted(state.departures)]
    if state.phase != UNWINDING:
        return finished(state)
    state = notices.everybody_out(state, at)
    if state.incident:
        state = replace(state, incident=state.incident.settled(at))
    if state.salvage is None:
        state, commands = _take_live_tier(state)
        if commands:
            return state.due("seal", at + state.limits.form_timeout_s), commands
    elif state.salvage and state.incident and state.incident.salvaged_at < state.incident.settled_at:
        state = replace(state, incident=state.incident.salvaged(at))
    if state.stop_asked:
        return stopped(state)
    refused = next((d for d in departures if d.cause == "refused"), None)
    if refused:
        return end_run(state, EndRun("failed", refused.error, refused, kind="refused"))
    failing = sorted((d for d in departures if d.cause in ("lost", "error") and not d.collateral), key=lambda d: d.at)
    own = [d for d in failing if d.failure_class in REPEATS]
    suffered = [d for d in failing if d.failure_class not in REPEATS]
    unreadable = next((d for d in departures if d.cause == "unreadable"), None)
    others = [d for d in departures if d.cause in ("lost", "error") and d.collateral]
    ended: EndRun | None = None
    quarantine: tuple[Any, ...] = ()
    if unreadable and not suffered:
        state, ended, quarantine = _not_restored(state, unreadable)
    if own and not suffered and not ended:
        step = max(d.step for d in departures)
        state, ended = user_error(state, [replace(d, step=step) if d.cause == "lost" else d for d in own], at)
    elif not ended and not suffered and not unreadable:
        ended = parted(state)
    if not ended and (suffered or unreadable or (others and not own)):
        state, ended = failed_once_more(state, suffered or [d for d in (unreadable, *others) if d], at)
    if ended:
        state, ending = end_run(state, ended)
        return state, (*quarantine, *ending)
    return released(state), quarantine


def _take_live_tier(state: RunState) -> Outcome:
    """If survivors hold a later boundary than any snapshot, and can prove it, it becomes one before anything else.

    A step counts if who stands there covers everything: the last step that any survivor of replicated state finished.
    """
    kept = [d for d in state.departures.values() if d.live_bytes and _stages(state, d.member)]
    newest = newest_restorable(state.node_snapshots, state.remotes)
    step = max((d.step for d in kept), default=-1)
    chosen = tuple(sorted(d.rank for d in kept if d.step == step))
    if kept and (newest is None or newest.step < step):
        state = replace(state, salvage=chosen, round_open="live", round_cancelled=False, nodes_lost=frozenset())
        return state, (StartSalvage(chosen, step),)
    state = replace(state, salvage=())
    if state.incident and not kept:
        told = sorted({d.live_reason for d in state.departures.values() if d.live_reason})
        reason = "; ".join(told) or "no rank survived with its state"
        state = replace(state, incident=replace(state.incident, not_live=reason))
    return state, ()


def _stages(state: RunState, name: str) -> bool:
    """Whether the member lives and has a store to stage into."""
    member = state.members.get(name)
    return member is not None and member.node in state.nodes and state.nodes[member.node].store_ready


def parted(state: RunState) -> EndRun | None:
    """Whether some ranks returned in the middle while others went on: it would be the same the next time."""
    left = state.departures
    early = next((d for d in left.values() if d.cause == "finished" and d.rank not in state.at_end), None)
    others = [rank for rank in range(len(state.ranks)) if rank not in left or left[rank].cause != "finished"]
    if early is None or not others or any(d.cause in ("lost", "unreadable", "refused") for d in left.values()):
        return None
    error = f"it returned after step {early.step} while rank {others[0]} went on; all have to take the same steps"
    return EndRun("failed", "the ranks parted", replace(early, error=error), deterministic=True, kind="user")


def _not_restored(state: RunState, departure: Departure) -> tuple[RunState, EndRun | None, tuple[Any, ...]]:
    """Try a snapshot that could not be restored once more, then the next older one; without one the run ends. What was
    read from storage alone and is damaged goes into quarantine; memory is gone after the run anyway."""
    order = state.restoring
    if order is None:
        return state, None, ()
    times = state.unreadable.get(order.attempt, 0) + 1
    state = replace(state, unreadable={**state.unreadable, order.attempt: times})
    if times < UNREADABLE_TRIES:
        return state, None, ()
    commands: tuple[Any, ...] = ()
    if order.node is None and order.remote and not order.other_run and isinstance(departure.failure, CorruptSnapshot):
        commands = (Quarantine(order.remote, departure.error),)
    if order.node is not None:
        state = replace(state, node_snapshots=tuple(s for s in state.node_snapshots if s.attempt != order.node.attempt))
    if order.remote is not None:
        state = replace(state, remotes=tuple(s for s in state.remotes if s.attempt != order.remote.attempt))
    if newest_restorable(state.node_snapshots, state.remotes) is None:
        return state, EndRun("failed", departure.error, departure, kind="refused"), commands
    return state, None, commands
