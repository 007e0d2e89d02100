"""A generation at work: its first boundary, its snapshots, its last boundary. Pure."""

from __future__ import annotations

from dataclasses import replace

from elastic.protocol.departures import settle
from elastic.protocol.endings import end_run
from elastic.protocol.gathering import fill
from elastic.protocol.run_commands import CloseIncident, EndRoundBeyond, EndRun, StartRound
from elastic.protocol.run_events import (
    AtEnd,
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
    rank_in_generation,
)
from elastic.protocol.tiers import newest_restorable

FINAL_TRIES = 3
"""How often the snapshot at the end of the last step is tried again before the run fails for want of it."""


def formed(state: RunState, event: Formed) -> Outcome:
    if rank_in_generation(state, event) is None or state.incident is None:
        return state, ()
    return replace(state, incident=state.incident.formed(event.at, event.took_s)), ()


def entered(state: RunState, event: Entered) -> Outcome:
    rank = rank_in_generation(state, event)
    if rank is None:
        return state, ()
    incident = state.incident.entered(event.at, event.step) if state.incident else None
    state = replace(state, entered={**state.entered, rank: event.share_bytes}, incident=incident)
    if len(state.entered) < len(state.ranks):
        return state, ()
    state = replace(state, phase=RUNNING, deadline=None, deadline_for="")
    has_snapshot = newest_restorable(state.node_snapshots, state.remotes) is not None
    state = replace(state, round_open="redundancy" if has_snapshot else "entry")
    state, more = fill(state, event.at)
    return state, (StartRound(state.round_open, stop=False), *more)


def first_step(state: RunState, event: FirstStep) -> Outcome:
    if rank_in_generation(state, event) is None or state.incident is None:
        return state, ()
    incident = state.incident.first_step(event.at)
    return replace(state, incident=None), (CloseIncident(incident),)


def snapshot_due(state: RunState, event: SnapshotDue) -> Outcome:
    if state.round_open:
        return state, ()
    return replace(state, round_open="periodic"), (StartRound("periodic", stop=False),)


def at_end(state: RunState, event: AtEnd) -> Outcome:
    rank = rank_in_generation(state, event)
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


def node_committed(state: RunState, event: NodeCommitted) -> Outcome:
    kept = tuple(s for s in state.node_snapshots if s.step > event.snapshot.step)
    progressed = all(s.step < event.snapshot.step for s in state.node_snapshots) and event.purpose != "entry"
    state = replace(state, node_snapshots=(*kept, event.snapshot))
    if progressed and event.purpose != "redundancy":
        state = replace(state, failures_without_progress=0, avoid=frozenset())
    if event.generation != state.generation:
        return state, ()
    return _after_round(replace(state, round_open=""), event.at, event.purpose, "")


def round_abandoned(state: RunState, event: RoundAbandoned) -> Outcome:
    if event.generation != state.generation:
        return state, ()
    return _after_round(replace(state, round_open=""), event.at, event.purpose, event.reason)


def _after_round(state: RunState, at: float, purpose: str, failed: str) -> Outcome:
    """What a round's end leads to; ``failed`` is why it did not commit, empty where it did."""
    if state.phase == UNWINDING:
        return settle(state, at)
    if state.phase == STOPPING and failed:
        # The ranks were released and train on; what wanted the stop is asked again below.
        state = replace(state, phase=RUNNING, deadline=None, deadline_for="")
    if purpose == "entry" and failed:
        return end_run(
            state, EndRun("failed", f"the snapshot of the first step was not taken: {failed}", kind="snapshot")
        )
    if purpose == "final":
        if not failed:
            return settle(replace(state, phase=FINISHING), at)
        if state.departures or state.final_tries >= FINAL_TRIES:
            return end_run(state, EndRun("failed", f"the last snapshot was not taken: {failed}", kind="snapshot"))
        state = replace(state, final_tries=state.final_tries + 1)
    state, commands = _maybe_final(state)
    if commands:
        return state, commands
    return fill(state, at)


def remote_committed(state: RunState, event: RemoteCommitted) -> Outcome:
    remotes = sorted((event.snapshot, *state.remotes), key=lambda snapshot: -snapshot.step)
    return replace(state, remotes=tuple(remotes[:16])), ()
