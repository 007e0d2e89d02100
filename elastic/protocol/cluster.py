"""What happens to nodes, stores and members, in whatever phase the run is. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.protocol.departures import lose, settle
from elastic.protocol.endings import end_run
from elastic.protocol.gathering import fill
from elastic.protocol.membership import STARTING, WARM, Node
from elastic.protocol.run_commands import EndRun, KillMember, StartStore
from elastic.protocol.run_events import (
    ClusterSeen,
    Departure,
    EntryFailed,
    MemberLost,
    MemberReady,
    NodeRefused,
    StoreLost,
    StoreReady,
)
from elastic.protocol.run_state import Outcome, RunState


def cluster_seen(state: RunState, event: ClusterSeen) -> Outcome:
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
        state, more = store_lost(state, StoreLost(event.at, name, "the node left the cluster"))
        commands += more
    state, more = fill(state, event.at)
    return state, (*commands, *more)


def store_ready(state: RunState, event: StoreReady) -> Outcome:
    if event.node not in state.nodes:
        return state, ()
    nodes = {**state.nodes, event.node: replace(state.nodes[event.node], store_ready=True)}
    return fill(replace(state, nodes=nodes), event.at)


def store_lost(state: RunState, event: StoreLost) -> Outcome:
    if event.node not in state.nodes:
        return state, ()
    nodes = {name: node for name, node in state.nodes.items() if name != event.node}
    kept = tuple(snapshot.without(event.node) for snapshot in state.node_snapshots)
    state = replace(state, nodes=nodes, node_snapshots=kept)
    commands: list[Any] = []
    for member in [m for m in state.members.values() if m.node == event.node]:
        state, more = lose(state, member.name, event.at, event.why, kind="node", step=-1)
        commands += [KillMember(member.name, event.why), *more]
    state, more = settle(state, event.at)
    return state, (*commands, *more)


def member_ready(state: RunState, event: MemberReady) -> Outcome:
    member = state.members.get(event.member)
    if member is None or member.phase != STARTING:
        return state, ()
    state = replace(state, members={**state.members, member.name: replace(member, phase=WARM)})
    return fill(state, event.at)


def member_lost(state: RunState, event: MemberLost) -> Outcome:
    if event.member not in state.members:
        return state, ()
    state, commands = lose(state, event.member, event.at, event.why, kind="rank", step=event.step)
    state, more = settle(state, event.at)
    return state, (*commands, *more)


def entry_failed(state: RunState, event: EntryFailed) -> Outcome:
    departure = Departure(event.member, 0, "error", -1, event.at, event.error, event.traceback, failure=event.failure)
    return end_run(state, EndRun("failed", event.error, departure, kind="refused" if event.failure else "user"))


def node_refused(state: RunState, event: NodeRefused) -> Outcome:
    """At the start the run ends, so that the user hears of it; later the node is only left alone."""
    if not state.ranks:
        departure = Departure("", 0, "refused", -1, event.at, str(event.error), failure=event.error)
        return end_run(state, EndRun("failed", str(event.error), departure, kind="refused"))
    nodes = (
        {**state.nodes, event.node: replace(state.nodes[event.node], capacity=0)} if event.node in state.nodes else {}
    )
    return replace(state, nodes=nodes or state.nodes), ()
