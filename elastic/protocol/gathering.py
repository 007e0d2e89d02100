"""Who trains next: how many members there are, and when a generation begins. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.protocol import notices
from elastic.protocol.endings import end_run, stopped
from elastic.protocol.membership import (
    ACTIVE,
    STARTING,
    WARM,
    Member,
    choose_mesh,
    order_ranks,
    place_members,
)
from elastic.protocol.run_commands import BeginGeneration, EndRun, KillMember, StartMember
from elastic.protocol.run_state import FORMING, Outcome, RunState
from elastic.protocol.tiers import newest_restorable


def staff(state: RunState, at: float) -> Outcome:
    """Start members that are missing where there is room, hot spares among them, and end those that train nothing and
    are too many, or on a node that goes away."""
    if state.stop_asked:
        return state, ()
    commands: list[Any] = []
    wanted = state.target + state.limits.hot_spares
    spare = [member for member in state.members.values() if member.phase in (STARTING, WARM)]
    drop = notices.dropped(state, at)
    for member in [member for member in spare if member.name in drop]:
        spare.remove(member)
        commands.append(KillMember(member.name, "its node goes away"))
        state = replace(state, members={name: m for name, m in state.members.items() if name != member.name})
    too_many = notices.counted(state) - wanted
    if too_many > 0 and spare:
        # Who is not ready goes first, then who was in no generation, then the highest rank.
        order = {name: rank for rank, name in enumerate(state.ranks)}
        spare.sort(key=lambda member: (member.phase == WARM, -order.get(member.name, len(order)), member.name))
        for member in spare[:too_many]:
            commands.append(KillMember(member.name, "fewer ranks are wanted"))
            state = replace(state, members={name: m for name, m in state.members.items() if name != member.name})
    missing = wanted - notices.counted(state)
    if missing > 0 and "start" not in state.deadlines:
        closed = notices.closed(state)
        for node in place_members(state.nodes.values(), state.members.values(), missing, state.avoid, closed):
            name = f"m{state.members_made:04d}"
            members = {**state.members, name: Member(name, node)}
            state = replace(state, members_made=state.members_made + 1, members=members)
            commands.append(StartMember(name, node))
    return state, tuple(commands)


def better_generation(state: RunState, at: float) -> str:
    """The purpose of a stop that leads to a better generation, or nothing."""
    if state.stop_asked:
        return "stop"
    if notices.leaving_ranks(state):
        return notices.way_out(state, at)
    limits = state.limits
    starting = sum(member.phase == STARTING for member in state.members.values())
    mesh, _ = choose_mesh(limits.mesh, limits.min_workers, state.target, len(state.members) - starting)
    if mesh is None or mesh == state.mesh:
        return ""
    if mesh.world_size < len(state.ranks):
        return "shrink"
    # Who is about to be ready joins at the same stop, unless it would only stand by.
    with_all, _ = choose_mesh(limits.mesh, limits.min_workers, state.target, len(state.members))
    return "grow" if with_all == mesh else ""


def gather(state: RunState, at: float) -> Outcome:
    """Begin the next generation if the ready members can form a mesh, now or when the wait for more is over."""
    if state.stop_asked:
        return stopped(state)
    if "again" in state.deadlines:
        return state, ()
    limits = state.limits
    ready = [member for member in state.members.values() if member.phase == WARM]
    mesh, reason = choose_mesh(limits.mesh, limits.min_workers, state.target, len(ready))
    if mesh is None:
        state = state.undue("more").due("cluster", at + limits.wait_for_cluster_s)
        if at >= state.deadlines["cluster"]:
            reason = f"{reason}; no more came in {limits.wait_for_cluster_s:g} s"
            return end_run(state, EndRun("failed", reason, kind="cluster"))
        return state, ()
    if not state.ranks and len(ready) < state.target and _more_to_come(state):
        # A start may wait a little for its full size; a recovery never does: the late ones join at a boundary.
        state = state.due("more", at + limits.wait_for_workers_s)
        if at < state.deadlines["more"]:
            return state, ()
    ranks = order_ranks(state.ranks, ready, mesh.world_size)
    generation = state.generation + 1
    restore = newest_restorable(state.node_snapshots, state.remotes)
    state = replace(
        state,
        phase=FORMING,
        generation=generation,
        ranks=ranks,
        mesh=mesh,
        members={name: replace(m, phase=ACTIVE) if name in ranks else m for name, m in state.members.items()},
        entered={},
        at_end={},
        departures={},
        restoring=restore,
        first_round_due=False,
        round_failures=0,
        salvage=None,
        incident=state.incident.begun(at, generation, mesh.world_size) if state.incident else None,
    ).undue("cluster", "more", "retry")
    state, told = notices.begun(state, at)
    state = state.due("form", at + limits.form_timeout_s)
    return state, (
        *told,
        BeginGeneration(generation, ranks, mesh, restore, hold=restore is None, reason=reason),
    )


def _more_to_come(state: RunState) -> bool:
    if any(member.phase == STARTING for member in state.members.values()):
        return True
    closed = notices.closed(state)
    room = any(n.store_starting and n.capacity > 0 and n.name not in closed for n in state.nodes.values())
    return room and len(state.members) < state.target
