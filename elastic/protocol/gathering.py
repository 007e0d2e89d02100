"""Who trains next: starts missing members, begins generations, stops one where a better one is possible. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.protocol.endings import end_run
from elastic.protocol.membership import (
    ACTIVE,
    STARTING,
    WARM,
    Member,
    choose_mesh,
    order_ranks,
    place_members,
)
from elastic.protocol.run_commands import BeginGeneration, EndRun, KillMember, StartMember, StartRound
from elastic.protocol.run_events import ResizeAsked, StopAsked
from elastic.protocol.run_state import (
    ENDED,
    FINISHING,
    FORMING,
    GATHERING,
    RUNNING,
    STOPPING,
    Outcome,
    RunState,
)
from elastic.protocol.tiers import newest_restorable


def fill(state: RunState, at: float) -> Outcome:
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
            return end_run(state, EndRun("failed", reason, kind="cluster"))
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


def resize_asked(state: RunState, event: ResizeAsked) -> Outcome:
    limits = state.limits
    target = max(limits.min_workers, min(limits.max_workers, event.workers))
    return fill(replace(state, target=target), event.at)


def resize_later(state: RunState, event: ResizeAsked) -> Outcome:
    limits = state.limits
    return replace(state, target=max(limits.min_workers, min(limits.max_workers, event.workers))), ()


def stop_asked(state: RunState, event: StopAsked) -> Outcome:
    state = replace(state, stop_asked=True)
    if state.phase == GATHERING:
        return end_run(state, EndRun("stopped", "stopped as asked"))
    return fill(state, event.at)


def stop_later(state: RunState, event: StopAsked) -> Outcome:
    return replace(state, stop_asked=True), ()
