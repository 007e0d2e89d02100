"""What happens to nodes, stores and members, in whatever phase the run is. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.protocol import notices
from elastic.protocol.departures import give_up_on, lose
from elastic.protocol.endings import end_run
from elastic.protocol.membership import STARTING, WARM, Node
from elastic.protocol.run_commands import EndRun, KillMember, StartStore
from elastic.protocol.run_events import (
    ClusterSeen,
    Departure,
    EntryFailed,
    MemberLost,
    MemberReady,
    NodeRefused,
    RanksHung,
    StoreLost,
    StoreReady,
)
from elastic.protocol.run_state import Outcome, RunState, backoff_s

SEAL_GRACE_S = 1.0
"""How long a round may go on after a store was lost: its shares may all be sealed and lie with its peer."""


def cluster_seen(state: RunState, event: ClusterSeen) -> Outcome:
    nodes = dict(state.nodes)
    commands: list[Any] = []
    for name, (capacity, domain) in event.nodes.items():
        nodes[name] = replace(nodes.get(name, Node(name, capacity, domain=domain)), capacity=capacity)
        if capacity > 0 and not nodes[name].store and f"store {name}" not in state.deadlines:
            nodes[name] = replace(nodes[name], store="starting")
            commands.append(StartStore(name))
    state = replace(state, nodes=nodes)
    for name in [name for name in nodes if name not in event.nodes]:
        state, more = _memory_lost(state, name, event.at, "the node left the cluster")
        state = replace(state, nodes={other: node for other, node in state.nodes.items() if other != name})
        state, told = notices.node_gone(state.undue(f"store {name}"), name, event.at)
        commands += [*more, *told]
    return state, tuple(commands)


def store_ready(state: RunState, event: StoreReady) -> Outcome:
    return _with_node(state, event.node, store="ready"), ()


def store_lost(state: RunState, event: StoreLost) -> Outcome:
    """Its memory is gone, and its ranks with it; the node stays, and its store is started again after a while."""
    if event.node not in state.nodes:
        return state, ()
    calm = state.incident is None
    state, commands = _memory_lost(state, event.node, event.at, event.why)
    if calm and state.incident:
        state = replace(state, incident=state.incident.since(event.at - event.silent_s))
    failures = state.nodes[event.node].store_failures + 1
    state = _with_node(state, event.node, store="", store_failures=failures)
    return state.due(f"store {event.node}", event.at + backoff_s(failures, 0.5, 60.0)), commands


def start_store(state: RunState, node: str) -> Outcome:
    """The wait after the loss of a store is over."""
    if node not in state.nodes or state.nodes[node].capacity <= 0:
        return state, ()
    return _with_node(state, node, store="starting"), (StartStore(node),)


def _memory_lost(state: RunState, node: str, at: float, why: str) -> Outcome:
    kept = tuple(snapshot.without(node) for snapshot in state.node_snapshots)
    state = replace(state, node_snapshots=kept, nodes_lost=state.nodes_lost | {node})
    if state.round_open and any(m.node == node and m.name in state.ranks for m in state.members.values()):
        state = state.undue("seal").due("seal", at + SEAL_GRACE_S)
    commands: list[Any] = []
    for member in [m for m in state.members.values() if m.node == node]:
        state, more = lose(state, member.name, at, why, kind="node")
        commands += [KillMember(member.name, why), *more]
    return state, tuple(commands)


def _with_node(state: RunState, name: str, **changes: Any) -> RunState:
    if name not in state.nodes:
        return state
    return replace(state, nodes={**state.nodes, name: replace(state.nodes[name], **changes)})


def member_ready(state: RunState, event: MemberReady) -> Outcome:
    member = state.members.get(event.member)
    if member is None or member.phase != STARTING:
        return state, ()
    members = {**state.members, member.name: replace(member, phase=WARM)}
    return replace(state, members=members, start_failures=0), ()


def member_lost(state: RunState, event: MemberLost) -> Outcome:
    """A member that dies while it starts is started again after a while, longer each time."""
    member = state.members.get(event.member)
    if member is None:
        return state, ()
    if member.phase == STARTING:
        failures = state.start_failures + 1
        state = replace(state, start_failures=failures).due("start", event.at + backoff_s(failures, 0.5, 60.0))
    return lose(
        state,
        event.member,
        event.at,
        event.why,
        kind="rank",
        step=event.step,
        failure_class=event.failure_class,
        traceback=event.traceback,
    )


def ranks_hung(state: RunState, event: RanksHung) -> Outcome:
    """They are killed, which frees those that wait for them. The incident began when they came to stand still."""
    if event.generation != state.generation:
        return state, ()
    calm = state.incident is None
    state, commands = give_up_on(state, event.at, event.members, event.why)
    if calm and state.incident:
        state = replace(state, incident=replace(state.incident.since(event.at - event.stood_s), stacks=event.stacks))
    return state, commands


def entry_failed(state: RunState, event: EntryFailed) -> Outcome:
    """At the start the run ends with the user's error. Later the same code runs elsewhere: it is the node's fault."""
    if not state.ranks:
        departure = Departure(
            event.member, 0, "error", -1, event.at, event.error, event.traceback, failure=event.failure
        )
        return end_run(state, EndRun("failed", event.error, departure, kind="refused" if event.failure else "user"))
    if event.member not in state.members:
        return state, ()
    state = _with_node(state, state.members[event.member].node, refused=True)
    state, commands = lose(state, event.member, event.at, event.error, kind="rank")
    return state, (KillMember(event.member, event.error), *commands)


def node_refused(state: RunState, event: NodeRefused) -> Outcome:
    """At the start the run ends, so that the user hears of it; later the node is only left alone."""
    if not state.ranks:
        departure = Departure("", 0, "refused", -1, event.at, str(event.error), failure=event.error)
        return end_run(state, EndRun("failed", str(event.error), departure, kind="refused"))
    return _with_node(state, event.node, store="refused"), ()
