"""How a generation ends: ranks leave or are lost, and when everybody is out the run decides what comes next. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.protocol.endings import end_run, finished
from elastic.protocol.gathering import fill
from elastic.protocol.incident import Incident
from elastic.protocol.membership import UNWOUND, WARM
from elastic.protocol.run_commands import CancelRound, EndRun, Interrupt, KillMember, MakeDurable, Probe
from elastic.protocol.run_events import Departed, Departure, Tick
from elastic.protocol.run_state import (
    ENDED,
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
from elastic.protocol.tiers import newest_restorable


def lose(state: RunState, name: str, at: float, why: str, *, kind: str, step: int) -> Outcome:
    """Take ``name`` out of the run; if it is in the living generation, that generation ends."""
    member = state.members[name]
    members = {other: m for other, m in state.members.items() if other != name}
    state = replace(state, members=members, avoid=state.avoid | {member.node})
    rank = state.rank_of(name)
    if rank is None or state.phase in (GATHERING, ENDED) or state.departures.get(rank):
        return state, ()
    return _depart(state, Departure(name, rank, "lost", step, at, error=why), kind)


def departed(state: RunState, event: Departed) -> Outcome:
    departure = event.departure
    if event.generation != state.generation or state.rank_of(departure.member) != departure.rank:
        return state, ()
    if departure.rank in state.departures or departure.member not in state.members:
        return state, ()
    member = state.members[departure.member]
    state = replace(state, members={**state.members, member.name: replace(member, phase=UNWOUND)})
    state, commands = _depart(state, departure, "error")
    state, more = settle(state, event.at)
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
    others = remaining(state)
    commands: list[Any] = []
    if not already:
        state = replace(state, **_unwind_deadline(state, departure.at))
        if state.round_open:
            commands.append(CancelRound(f"the generation ended: {departure.error or departure.cause}"))
        if others:
            commands.append(Interrupt(others, state.generation))
    if departure.collateral and others:
        commands.append(Probe(others))
    return state, tuple(commands)


def _unwind_deadline(state: RunState, at: float) -> dict[str, Any]:
    return {"deadline": at + state.limits.unwind_timeout_s, "deadline_for": "unwind"}


def settle(state: RunState, at: float) -> Outcome:
    """When everybody is out, decide what comes next."""
    all_out = bool(state.ranks) and len(state.departures) == len(state.ranks)
    if (
        state.phase in (RUNNING, FINISHING)
        and all_out
        and all(d.cause == "finished" for d in state.departures.values())
    ):
        return (state, ()) if state.round_open else finished(state)
    if state.phase != UNWINDING or remaining(state):
        return state, ()
    if state.round_open and not any(d.cause in ("lost", "error") for d in state.departures.values()):
        return state, ()  # a voluntary stop: its snapshot is still being sealed
    state = replace(state, deadline=None, deadline_for="", round_open="")
    causes = [state.departures[rank] for rank in sorted(state.departures)]
    if state.incident:
        state = replace(state, incident=state.incident.settled(at))
    refused = next((d for d in causes if d.cause == "refused"), None)
    if refused:
        return end_run(state, EndRun("failed", refused.error, refused, kind="refused"))
    unreadable = next((d for d in causes if d.cause == "unreadable"), None)
    if unreadable:
        state = _without_snapshot(state, state.restoring)
        if newest_restorable(state.node_snapshots, state.remotes) is None:
            return end_run(state, EndRun("failed", unreadable.error, unreadable, kind="refused"))
    if state.stop_asked and not any(d.cause in ("lost", "error") for d in causes):
        return replace(state, phase=FINISHING, ending=EndRun("stopped", "stopped as asked")), (MakeDurable(),)
    own = sorted((d for d in causes if d.cause == "error" and not d.collateral), key=lambda d: d.at)
    lost = [d for d in causes if d.cause == "lost"]
    if own and not lost:
        state, ended = _user_error(state, own[0])
        if ended:
            return end_run(state, ended)
    elif lost or any(d.cause == "error" for d in causes):
        count = state.failures_without_progress + 1
        state = replace(state, failures_without_progress=count)
        if count > state.limits.max_failures_without_progress:
            why = (lost or [d for d in causes if d.error])[0].error
            return end_run(
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
    return fill(state, at)


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


def _without_snapshot(state: RunState, attempt: str) -> RunState:
    """The state without a snapshot that could not be restored: it is not offered again."""
    return replace(
        state,
        node_snapshots=tuple(s for s in state.node_snapshots if s.attempt != attempt),
        remotes=tuple(s for s in state.remotes if s.attempt != attempt),
    )


def tick(state: RunState, event: Tick) -> Outcome:
    if state.deadline is None or event.at < state.deadline:
        return state, ()
    if state.phase == FORMING:
        late = tuple(name for rank, name in enumerate(state.ranks) if rank not in state.entered)
        return give_up_on(state, event.at, late, "did not reach its first boundary in time")
    if state.phase == UNWINDING:
        if state.round_open and not remaining(state):
            return replace(state, deadline=None), (CancelRound("its shares were not sealed in time"),)
        return give_up_on(state, event.at, remaining(state), "did not leave the train function in time")
    return fill(state, event.at)


def give_up_on(state: RunState, at: float, names: tuple[str, ...], why: str) -> Outcome:
    """Kill members that are too slow; they count as lost."""
    state = replace(state, deadline=None, deadline_for="")
    commands: list[Any] = []
    for name in names:
        if name in state.members:
            state, more = lose(state, name, at, why, kind="hang", step=-1)
            commands += [KillMember(name, why), *more]
    state, more = settle(state, at)
    return state, (*commands, *more)
