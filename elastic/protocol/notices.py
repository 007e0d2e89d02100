"""Word that a node goes away: what it means for who trains, and when to act on it. Pure.

A notice says which node, who says so and until when the node is there:

    drain     Ray drains it; nothing new can be placed there any more
    sigterm   one of the run's processes there was told to end
    exclude   a user does not want it
    straggler a rank is slow there; after a while it is used again

All that come close together lead to one decision at one boundary, as late as it is safe and as early as it is useful:

    where the ranks that stay, with those that are about to be ready, can form a mesh    shrink, or move
    where they cannot                               a durable snapshot now, train on, leave just before the deadline

Nothing is lost either way: the generation ends at a boundary with a snapshot. A notice that is taken back before the
decision changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from elastic.mesh import Mesh
from elastic.protocol.fitness import cooling, trusted_again
from elastic.protocol.membership import STARTING, Evacuation, Member, Notice, choose_mesh, smallest
from elastic.protocol.run_commands import CloseNotice, Warn
from elastic.protocol.run_events import NodeLeaving, NodeStaying
from elastic.protocol.run_state import GATHERING, Outcome, RunState

QUIET_S = 2.0
"""A decision waits so long for the next notice: drains of many nodes come staggered."""
MOST_QUIET_S = 10.0
"""But no longer than this since the first."""
REPLACE_S = 30.0
"""How long a move waits for members that are about to be ready, where the deadline allows it."""
_DEADLINES = ("notice", "replaced", "leave")
EXCLUDE = "exclude"
SOFT = "sigterm"
"""A process was told to end, not its node: where there is no other place for it, the node is used again."""

SLOW = "straggler"
SLOW_S = 600.0
"""How long a node is not used on which a rank was slow."""

_LAPSES = {SOFT: "lapse", SLOW: "slow"}
"""Notices that are over by themselves, with the names of their deadlines."""


def node_leaving(state: RunState, event: NodeLeaving) -> Outcome:
    """Note it; where it concerns ranks that train, the time to decide is set anew."""
    if event.node not in state.nodes:
        return state, ()
    known = next((n for n in state.notices if (n.node, n.by) == (event.node, event.by)), None)
    told = {event.member} - {""}
    notice = Notice(event.node, event.by, event.why, event.at, event.deadline, frozenset(told))
    if known is not None:
        # What is told again is the same notice: it keeps its time, and takes the nearer deadline of two signals.
        until = min(known.deadline, event.deadline) if event.by == SOFT else event.deadline
        notice = replace(notice, at=known.at, deadline=until, members=known.members | told)
    notices = (*(n for n in state.notices if n is not known), notice)
    state = replace(
        state,
        notices=notices,
        needs_s=event.needs_s,
        upload_s=event.upload_s,
        insured=state.insured and known is not None,
    )
    state = _until_it_lapses(state, notice)
    plan = state.evacuation
    if plan is not None and plan.out_at >= 0 and leaving_ranks(state):
        state, commands = _closed(state, plan, event.at)
        return _plan(state, event.at), commands
    return _plan(state, event.at), ()


def again(state: RunState, at: float) -> RunState:
    """The times to decide, for a controller that takes over and knows the notices."""
    for notice in state.notices:
        state = _until_it_lapses(state, notice)
    return _plan(state, at)


def node_staying(state: RunState, event: NodeStaying) -> Outcome:
    """The notice is over: the node stays, and is used again."""
    notices = tuple(n for n in state.notices if (n.node, n.by) != (event.node, event.by))
    state = replace(state, notices=notices)
    if event.by in _LAPSES:
        state = state.undue(f"{_LAPSES[event.by]} {event.node}")
    if event.by == EXCLUDE:
        state = trusted_again(state, event.node)
    plan = state.evacuation
    if leaving_ranks(state) or plan is None or plan.purpose:
        return _plan(state, event.at), ()
    over = replace(plan, purpose="cancelled", out_at=event.at, ended_at=event.at, new_world_size=plan.old_world_size)
    return replace(state, evacuation=None).undue(*_DEADLINES), (CloseNotice(over),)


def lapse(state: RunState, node: str, by: str, at: float) -> Outcome:
    """A notice is over by itself: a process was told to end and its node is still there long after, so that it was not
    about the node; or a rank was slow there long ago."""
    return node_staying(state, NodeStaying(at, node, by))


def _until_it_lapses(state: RunState, notice: Notice) -> RunState:
    """With the time at which the notice is over by itself, if it is of a kind that is."""
    if notice.by not in _LAPSES:
        return state
    name = f"{_LAPSES[notice.by]} {notice.node}"
    return state.undue(name).due(name, 2 * notice.deadline - notice.at if notice.by == SOFT else notice.at + SLOW_S)


def node_gone(state: RunState, node: str, at: float) -> Outcome:
    """The node went away: what was told of it has come true, and ``departures`` sees to what was lost."""
    notices = tuple(n for n in state.notices if n.node != node)
    return replace(state, notices=notices).undue(*(f"{name} {node}" for name in _LAPSES.values())), ()


def leaving(state: RunState) -> frozenset[str]:
    """Nodes that go away."""
    return frozenset(notice.node for notice in state.notices)


def leaving_ranks(state: RunState) -> tuple[str, ...]:
    """Members of the generation on nodes that go away."""
    gone = leaving(state)
    return tuple(name for name in state.ranks if name in state.members and state.members[name].node in gone)


def staying(state: RunState) -> tuple[Member, ...]:
    """Members on nodes that stay."""
    gone = leaving(state)
    return tuple(member for member in state.members.values() if member.node not in gone)


def earliest(state: RunState) -> float:
    """When the first node that the generation trains on goes away."""
    used = {state.members[name].node for name in leaving_ranks(state)}
    return min((notice.deadline for notice in state.notices if notice.node in used), default=math.inf)


def last_call_s(state: RunState) -> float:
    """How long before a deadline a generation has to begin to leave, if it has nowhere to go on: only where a node
    stays that holds a replica, memory is enough."""
    gone = leaving(state)
    held = state.limits.replicas and any(n.store_ready for name, n in state.nodes.items() if name not in gone)
    return state.needs_s + (0.0 if held else state.upload_s)


def leave_by(state: RunState) -> float:
    """The last moment to begin to leave."""
    return earliest(state) - last_call_s(state)


def _plan(state: RunState, at: float) -> RunState:
    """When to decide: after a quiet time, but never so late that the snapshot does not fit any more."""
    concerned = leaving_ranks(state)
    if not concerned:
        return state
    nodes = tuple(sorted({state.members[name].node for name in concerned}))
    by = ", ".join(sorted({notice.by for notice in state.notices if notice.node in nodes}))
    plan = state.evacuation
    if plan is None or plan.out_at >= 0:
        plan = Evacuation(by, nodes, len(state.ranks), at)
    plan = replace(plan, by=by, nodes=tuple(sorted({*plan.nodes, *nodes})), deadline=earliest(state))
    state = replace(state, evacuation=plan).undue(*_DEADLINES)
    if plan.purpose and plan.out_at < 0:
        return state  # decided: everybody is on the way out
    last, latest = leave_by(state), earliest(state) - state.needs_s
    quiet = min(at + QUIET_S, plan.opened_at + MOST_QUIET_S, latest)
    if quiet > at:
        state = state.due("notice", quiet)
    if (wait := min(plan.opened_at + REPLACE_S, latest)) > at:
        state = state.due("replaced", wait)
    return state.due("leave", last) if at < last < math.inf else state


def staying_mesh(state: RunState, *, starting: bool) -> Mesh | None:
    """The mesh that members on staying nodes can form, with or without those that are still starting."""
    limits = state.limits
    have = sum(starting or member.phase != STARTING for member in staying(state))
    return choose_mesh(limits.mesh, limits.min_workers, state.target, have)[0]


def way_out(state: RunState, at: float) -> str:
    """The purpose of the stop that takes the generation off nodes that go away, or nothing yet."""
    if "notice" in state.deadlines or not leaving_ranks(state):
        return ""
    mesh = staying_mesh(state, starting=False)
    hoped = staying_mesh(state, starting=True)
    if hoped is not None and hoped != mesh and "replaced" in state.deadlines:
        return ""
    if mesh is not None:
        return "shrink" if mesh.world_size < len(state.ranks) else "move"
    return "leave" if at >= leave_by(state) else ""


def insurance_due(state: RunState) -> bool:
    """Nodes of the generation go away, there is no other place yet, and nothing was made durable since it is known."""
    if state.insured or "notice" in state.deadlines or not leaving_ranks(state):
        return False
    return staying_mesh(state, starting=False) is None


def decided(state: RunState, purpose: str, at: float) -> Outcome:
    """A stop was opened because of notices; where its snapshot may not fit before the deadline, that is told."""
    plan = state.evacuation
    if plan is None or plan.purpose or purpose not in ("shrink", "move", "leave"):
        return state, ()
    plan = replace(plan, purpose=purpose, decided_at=at, needs_s=state.needs_s, deadline=earliest(state))
    state = replace(state, evacuation=plan)
    left = plan.deadline - at
    if left >= state.needs_s:
        return state, ()
    nodes = ", ".join(node[:12] for node in plan.nodes)
    text = (
        f"node {nodes} goes in {max(0.0, left):.1f} s and the snapshot of the boundary needs {state.needs_s:.1f} s: "
        "steps after the last snapshot may be lost"
    )
    return state, (Warn(text),)


def undecided(state: RunState) -> RunState:
    """The stop came to nothing; whether there is to be another is asked again."""
    plan = state.evacuation
    if plan is None or plan.out_at >= 0:
        return state
    return replace(state, evacuation=replace(plan, purpose="", decided_at=-1.0))


def everybody_out(state: RunState, at: float) -> RunState:
    """The generation that had to leave has left."""
    plan = state.evacuation
    if plan is None or not plan.purpose or plan.out_at >= 0:
        return state
    return replace(state, evacuation=replace(plan, out_at=at))


def begun(state: RunState, at: float) -> Outcome:
    """The next generation begins: what its ranks are on may go away in turn.

    A process that was told to end has ended; where its node had to be used again, that is all there was to it.
    """
    served = {
        n
        for n in state.notices
        if n.by == SOFT and at >= n.deadline - last_call_s(state) and not n.members & {*state.members}
    }
    state = replace(state, notices=tuple(n for n in state.notices if n not in served))
    plan = state.evacuation
    commands: tuple[Any, ...] = ()
    if leaving_ranks(state):
        if plan is not None and plan.out_at >= 0:
            state, commands = _closed(state, plan, at)
    elif plan is not None and plan.out_at < 0:
        plan = replace(plan, purpose=plan.purpose or "unwound", out_at=at)
        state = replace(state, evacuation=plan).undue(*_DEADLINES)
    return _plan(state, at), commands


def going_on(state: RunState, at: float) -> Outcome:
    """The first step after it: the story of these notices is complete."""
    plan = state.evacuation
    return (state, ()) if plan is None or plan.out_at < 0 else _closed(state, plan, at)


def _closed(state: RunState, plan: Evacuation, at: float) -> Outcome:
    story = replace(plan, ended_at=at, new_world_size=len(state.ranks))
    return replace(state, evacuation=None), (CloseNotice(story),)


def counted(state: RunState) -> int:
    """Members that are there to stay: who is on a node that goes away has to be replaced."""
    gone = leaving(state) & closed(state)
    return sum(member.node not in gone for member in state.members.values())


def dropped(state: RunState, at: float) -> frozenset[str]:
    """Members that train nothing now and are not to train again, because of where they are.

    Where the rest cannot form a mesh, who is on a node that goes away is kept as long as there is time to train.
    """
    gone = leaving(state)
    if not gone:
        return frozenset()
    if staying_mesh(state, starting=True) is None:
        late = {notice.node for notice in state.notices if at >= notice.deadline - last_call_s(state)}
        hard = {notice.node for notice in state.notices if notice.by != SOFT}
        told = {name for notice in state.notices if notice.node in late for name in notice.members}
        return frozenset(m.name for m in state.members.values() if m.node in late & hard or m.name in told)
    return frozenset(member.name for member in state.members.values() if member.node in gone)


def closed(state: RunState) -> frozenset[str]:
    """Nodes that take no new members."""
    hard = frozenset(notice.node for notice in state.notices if notice.by != SOFT)
    soft = (leaving(state) | cooling(state)) - hard
    if (
        soft
        and state.phase == GATHERING
        and _room(state) < smallest(state.limits.mesh, state.limits.min_workers, state.limits.max_workers)
    ):
        return hard
    return hard | soft


def _room(state: RunState) -> int:
    """Ranks that nodes can carry which neither go away nor are left alone."""
    gone = leaving(state) | cooling(state)
    return sum(node.capacity for name, node in state.nodes.items() if name not in gone and not node.refused)


def told(plan: Evacuation) -> dict[str, Any]:
    """For people: seconds from the first word to the decision, to everybody out, and from there to the next step."""
    return {
        "by": plan.by,
        "nodes": list(plan.nodes),
        "purpose": plan.purpose,
        "old_world_size": plan.old_world_size,
        "new_world_size": plan.new_world_size,
        "decided_s": max(0.0, plan.decided_at - plan.opened_at),
        "out_s": max(0.0, plan.out_at - plan.opened_at),
        "stood_still_s": max(0.0, plan.ended_at - plan.out_at),
        "needs_s": plan.needs_s,
        "notice_s": plan.deadline - plan.opened_at if math.isfinite(plan.deadline) else None,
    }
