"""A generation at work: its first boundary, its snapshots, its last boundary. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.protocol import notices
from elastic.protocol.classification import STORAGE
from elastic.protocol.departures import leave_all, settle
from elastic.protocol.endings import end_run, failed_once_more
from elastic.protocol.gathering import better_generation
from elastic.protocol.incident import Incident
from elastic.protocol.run_commands import CancelRound, CloseIncident, EndRoundBeyond, EndRun, Interrupt, StartRound
from elastic.protocol.run_events import (
    AtEnd,
    Departure,
    Entered,
    FirstStep,
    Formed,
    NodeCommitted,
    RemoteCommitted,
    RoundAbandoned,
    SnapshotDue,
)
from elastic.protocol.run_state import (
    FINISHING,
    RUNNING,
    STOPPING,
    UNWINDING,
    Outcome,
    RunState,
    backoff_s,
    rank_in_generation,
    remaining,
)

ROUND_TRIES = 8
"""How often a snapshot without which the run cannot go on, or not stop, is tried in a row: over about a minute."""

STOPS = ("grow", "shrink", "move", "leave", "stop")
"""Rounds at whose boundary the generation ends."""
_NEEDED = ("entry", "final")
_PASSING = ("periodic", "redundancy", "notice")


def formed(state: RunState, event: Formed) -> Outcome:
    if rank_in_generation(state, event) is None or state.incident is None:
        return state, ()
    return replace(state, incident=state.incident.formed(event.at, event.took_s)), ()


def entered(state: RunState, event: Entered) -> Outcome:
    rank = rank_in_generation(state, event)
    if rank is None:
        return state, ()
    incident = state.incident.entered(event.at, event.step) if state.incident else None
    return replace(state, entered={**state.entered, rank: event.share_bytes}, incident=incident), ()


def first_step(state: RunState, event: FirstStep) -> Outcome:
    return _incident_over(state, event.at) if rank_in_generation(state, event) is not None else (state, ())


def at_end(state: RunState, event: AtEnd) -> Outcome:
    """A rank has no step left. Once all have none, a round that names a later step will not be met."""
    rank = rank_in_generation(state, event)
    if rank is None:
        return state, ()
    state, commands = _incident_over(replace(state, at_end={**state.at_end, rank: event.step}), event.at)
    if len(state.at_end) == len(state.ranks) and state.round_open not in ("", "final"):
        commands = (*commands, EndRoundBeyond(max(state.at_end.values())))
    return state, commands


def _incident_over(state: RunState, at: float) -> Outcome:
    """The first new step is done, or there is none to do."""
    state, commands = notices.going_on(state, at)
    incident = state.incident
    if incident is None or incident.new_generation != state.generation:
        return state, commands
    return replace(state, incident=None), (*commands, CloseIncident(incident.first_step(at)))


def begin_work(state: RunState, at: float) -> Outcome:
    """FORMING: everybody stands at the first boundary, or has left."""
    if not remaining(state):
        return settle(state, at)
    if state.stop_asked:
        return leave_all(state, at, "a stop was asked")
    if len(state.entered) < len(state.ranks):
        return state, ()
    return replace(state, phase=RUNNING, first_round_due=True, progress_at=at).undue("form"), ()


def next_round(state: RunState, at: float) -> Outcome:
    """RUNNING: the round that is due now, the most urgent first."""
    if not remaining(state):
        return settle(state, at)
    if state.departures:
        return state, ()  # no round can be whole any more
    better = "" if state.at_end else better_generation(state, at)
    if state.round_open:
        if better and state.round_open in _PASSING and not state.round_cancelled:
            # The stop takes a snapshot of its own; the boundary of this one may be far.
            return replace(state, round_cancelled=True), (CancelRound(f"a stop comes first ({better})"),)
        return state, ()
    if "retry" in state.deadlines:
        return state, ()
    if state.first_round_due and state.restoring is None:
        return _open(state, "entry")
    if len(state.at_end) == len(state.ranks):
        return _open(state, "final")
    if better:
        state, told = notices.decided(state, better, at)
        state, commands = _open(replace(state, phase=STOPPING), better)
        return state, (*told, *commands)
    if notices.insurance_due(state) and not state.at_end:
        return _open(replace(state, insured=True), "notice")
    if state.first_round_due and not state.at_end:
        return _open(replace(state, first_round_due=False), "redundancy")
    return state, ()


def _open(state: RunState, purpose: str) -> Outcome:
    state = replace(state, round_open=purpose, round_cancelled=False, nodes_lost=frozenset())
    return state, (StartRound(purpose, stop=purpose in STOPS),)


def snapshot_due(state: RunState, event: SnapshotDue) -> Outcome:
    """Time for a snapshot, unless one is being made or something else comes first."""
    if state.round_open or state.at_end or state.departures or state.first_round_due or "retry" in state.deadlines:
        return state, ()
    return _open(state, "periodic") if not better_generation(state, event.at) else (state, ())


def node_committed(state: RunState, event: NodeCommitted) -> Outcome:
    snapshot = event.snapshot
    gone = {node for nodes in snapshot.places.values() for node in nodes if not _holds(state, node)}
    for node in gone:
        snapshot = snapshot.without(node)
    state = replace(state, node_snapshots=(snapshot,))
    began_at = state.restoring.step if state.restoring else 0
    if snapshot.step > began_at and event.purpose != "entry":
        state = progress(state, snapshot.step, event.at)
    if event.generation != state.generation:
        return state, ()
    state = _round_over(replace(state, round_failures=0), event.at)
    if event.purpose == "entry":
        state = replace(state, first_round_due=False)
    if event.purpose == "final" and state.phase == RUNNING:
        state = replace(state, phase=FINISHING)
    if state.phase == STOPPING:
        # All shares are there, so everybody is on the way out.
        state = replace(state, phase=UNWINDING).due("unwind", event.at + state.limits.unwind_timeout_s)
    return state, ()


def _holds(state: RunState, node: str) -> bool:
    return node not in state.nodes_lost and node in state.nodes and state.nodes[node].store_ready


def progress(state: RunState, step: int, at: float) -> RunState:
    """A step is committed: what failed in a row before it is forgiven, and budgets fill up by the time it took. Errors
    at later steps, or right there, are remembered."""
    committed_s = at - state.progress_at
    return replace(
        state,
        progress_at=at,
        spent={name: state.limits.budgets[name].refill(spent, committed_s) for name, spent in state.spent.items()},
        failures_without_progress=0,
        avoid=frozenset(),
        user_errors=tuple(met for met in state.user_errors if max(at for _, at in met) >= step),
        nodes={name: replace(node, store_failures=0) for name, node in state.nodes.items()},
    )


def round_abandoned(state: RunState, event: RoundAbandoned) -> Outcome:
    """A round came to nothing. One that is needed is tried again, at once or after everybody entered anew."""
    if event.generation != state.generation:
        return state, ()
    asked = state.round_cancelled
    state = _round_over(state, event.at)
    if state.phase == STOPPING:
        # The ranks were released; what wanted the stop is asked again.
        state = notices.undecided(replace(state, phase=RUNNING))
    if state.phase == UNWINDING and remaining(state):
        # Some left at the boundary, the others were released: they would train on without them.
        return state, (Interrupt(remaining(state), state.generation),)
    if state.phase != RUNNING or event.purpose not in (*STOPS, *_NEEDED):
        return state, ()
    if event.refused and event.purpose in _NEEDED:
        return end_run(state, EndRun("failed", event.reason, kind="snapshot"))
    all_at_end = len(state.at_end) == len(state.ranks)
    if event.confirmed and not (all_at_end and event.purpose in STOPS):
        return _enter_anew(state, event)
    if state.departures or (event.purpose in STOPS and (asked or all_at_end)):
        return state, ()
    failures = state.round_failures + 1
    state = replace(state, round_failures=failures)
    if failures < ROUND_TRIES or event.purpose in ("grow", "shrink", "move", "leave"):
        return state.due("retry", event.at + backoff_s(failures, 0.25, 30.0)), ()
    if event.purpose == "stop":
        return leave_all(state, event.at, "")
    which = "first" if event.purpose == "entry" else "last"
    reason = f"the snapshot of the {which} boundary was not taken: {event.reason}"
    return end_run(state, EndRun("failed", reason, kind="snapshot"))


def _enter_anew(state: RunState, event: RoundAbandoned) -> Outcome:
    """Some ranks may have left the boundary where the snapshot was due: only a new generation brings them together."""
    if event.purpose == "stop":
        return leave_all(state, event.at, "")
    unsealed = Departure("", -1, "lost", -1, event.at, event.reason, failure_class=STORAGE)
    state, ended = failed_once_more(state, [unsealed], event.at, kind="snapshot")
    if ended:
        return end_run(state, ended)
    step = max(state.at_end.values(), default=0)
    incident = state.incident or Incident.opened(
        kind="error",
        generation=state.generation,
        world_size=len(state.ranks),
        at=event.at,
        why=f"the {event.purpose} snapshot was not taken: {event.reason}",
        step=step,
    )
    return leave_all(replace(state, incident=incident), event.at, "")


def _round_over(state: RunState, at: float) -> RunState:
    state = replace(state, round_open="", round_cancelled=False, nodes_lost=frozenset()).undue("seal", "retry")
    if state.phase == UNWINDING and remaining(state):
        state = state.due("unwind", at + state.limits.unwind_timeout_s)
    return state


def remote_committed(state: RunState, event: RemoteCommitted) -> Outcome:
    remotes = sorted((event.snapshot, *state.remotes), key=lambda snapshot: -snapshot.step)
    return replace(state, remotes=tuple(remotes[:16])), ()


def leave_behind(state: RunState, at: float) -> tuple[RunState, tuple[Any, ...]]:
    """Some ranks returned early and the others still train: those end at their next boundary."""
    return leave_all(state, at, "some ranks returned before the end of their steps")
