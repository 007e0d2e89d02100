"""The life of a run under events in any order at all, also such as no cluster would send."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import ClusterError
from elastic.protocol import run_events
from elastic.protocol import run_lifecycle as life
from elastic.protocol.course import advance
from elastic.protocol.machine import Machine
from elastic.protocol.membership import Member, Node, order_ranks, peer_of, place_members
from elastic.protocol.run_state import Limits, RunState
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot

PHASES = (
    life.GATHERING, life.FORMING, life.RUNNING, life.STOPPING, life.UNWINDING, life.FINISHING, life.ENDED,
)  # fmt: skip
EVENTS = [
    kind for kind in vars(run_events).values()
    if isinstance(kind, type) and kind.__module__ == run_events.__name__ and kind is not life.Departure
]  # fmt: skip
FEW = settings(derandomize=True, deadline=None, max_examples=300)


def test_every_event_is_expected_in_every_phase() -> None:
    assert len(EVENTS) >= 20
    assert set(life.TABLE) == {(phase, event) for phase in PHASES for event in EVENTS}


members = st.sampled_from([f"m{number:04d}" for number in range(6)])
node_names = st.sampled_from(["n0", "n1", "n2"])
steps = st.integers(0, 9)


@st.composite
def events(draw: st.DrawFn, at: float, state: RunState) -> Any:
    """Any event: of this generation or the last one, about members that are, were or never were."""
    generation = state.generation - draw(st.sampled_from([0, 0, 0, 1]))
    known = [*state.ranks, *state.members]
    member = draw(st.sampled_from(known)) if known and draw(st.booleans()) else draw(members)
    kind = draw(st.sampled_from(EVENTS))
    if kind is life.ClusterSeen:
        names = draw(st.sets(node_names))
        return kind(at, {name: (draw(st.integers(0, 2)), "") for name in names})
    if kind in (life.StoreReady, life.StoreLost, life.NodeRefused):
        why = {life.StoreLost: ("gone",), life.NodeRefused: (ClusterError("other versions"),)}.get(kind, ())
        return kind(at, draw(node_names), *why)
    if kind is life.NodeLeaving:
        deadline = at + draw(st.sampled_from([-1.0, 0.5, 30.0, float("inf")]))
        by, told = draw(st.sampled_from([("drain", ""), ("exclude", ""), ("sigterm", member)]))
        until = deadline if by != "sigterm" else at + 25.0
        return kind(at, draw(node_names), by, "why", until, draw(st.sampled_from([0.1, 5.0])), draw(steps), told)
    if kind is life.NodeStaying:
        return kind(at, draw(node_names), draw(st.sampled_from(["drain", "exclude", "sigterm"])))
    if kind is life.MemberReady:
        return kind(at, member)
    if kind is life.EntryFailed:
        return kind(at, member, "ImportError", "")
    if kind is life.MemberLost:
        return kind(at, member, "died", draw(steps))
    if kind is life.RanksHung:
        return kind(at, (member,), generation, "stands still", draw(st.sampled_from([0.0, 30.0])))
    if kind is life.Formed:
        return kind(at, member, generation, 0.1)
    if kind is life.Entered:
        return kind(at, member, generation, draw(steps), 100)
    if kind in (life.FirstStep, life.AtEnd):
        return kind(at, member, generation, draw(steps))
    if kind is life.Departed:
        cause = draw(st.sampled_from(["interrupted", "finished", "error", "refused", "unreadable"]))
        rank = state.rank_of(member)
        departure = life.Departure(
            member, -1 if rank is None else rank, cause, draw(steps), at, "why", collateral=draw(st.booleans()),
            live_bytes=draw(st.sampled_from([0, 100])),
        )  # fmt: skip
        return kind(at, generation, departure)
    purpose = state.round_open or "periodic"
    if kind is life.NodeCommitted:
        places = {rank: (draw(node_names),) for rank in range(max(1, len(state.ranks)))}
        return kind(at, generation, NodeSnapshot(f"a{draw(steps)}", draw(steps), places), purpose)
    if kind is life.RoundAbandoned:
        return kind(at, generation, purpose, "why", draw(st.booleans()))
    if kind is life.RemoteCommitted:
        return kind(at, RemoteSnapshot(f"a{draw(steps)}", draw(steps)))
    if kind is life.UploadsIdle:
        return kind(at, draw(st.sampled_from(["", "why"])))
    if kind is life.ResizeAsked:
        return kind(at, draw(st.integers(-1, 9)))
    if kind is life.Late:
        return kind(at, draw(st.sampled_from([0.3, 60.0])))
    return kind(at)


@FEW
@given(st.data())
def test_a_walk_of_any_events_never_breaks_what_a_generation_is(data: st.DataObject) -> None:
    limits = Limits({"dp": -1}, data.draw(st.integers(1, 2)), 3, wait_for_workers_s=0.0)
    machine: Machine[RunState] = Machine("run", life.TABLE, RunState(limits, target=3))
    at = 0.0
    machine.handle(life.Tick(at))
    prologue = [
        life.ClusterSeen(0.0, {"n0": (2, ""), "n1": (2, "")}), life.StoreReady(0.0, "n0"), life.StoreReady(0.0, "n1"),
        *(life.MemberReady(0.0, f"m{number:04d}") for number in range(3)),
    ]  # fmt: skip
    for event in prologue[: data.draw(st.integers(0, len(prologue)))]:
        machine.handle(event)
    for _ in range(data.draw(st.integers(1, 40))):
        at += data.draw(st.sampled_from([0.0, 0.1, 5.0, 60.0]))
        before = machine.state
        event = data.draw(events(at, before))
        commands = machine.handle(event)
        state = machine.state
        assert state.generation - before.generation == sum(isinstance(c, life.BeginGeneration) for c in commands) <= 1
        assert (state.phase == life.ENDED) == any(isinstance(c, life.EndRun) for c in commands) or before == state
        if state.phase in (life.FORMING, life.RUNNING, life.STOPPING):
            assert state.mesh is not None
            assert state.mesh.world_size == len(state.ranks) == len(set(state.ranks))
            assert all(rank in state.departures or name in state.members for rank, name in enumerate(state.ranks))
        opened = [c for c in commands if isinstance(c, (life.StartRound, life.StartSalvage))]
        assert len(opened) <= 1
        assert not opened or not before.round_open or isinstance(event, (life.NodeCommitted, life.RoundAbandoned))
        if state is not before:  # an event that is ignored does not look at the clock either
            assert advance(state, at) == (state, ()), "what follows from a state is done at once"
        if isinstance(event, life.Tick) and state.deadline is not None:
            assert state.deadline > at


@FEW
@given(st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["", "r1", "r2", "r3"])))
def test_peers_are_other_nodes_in_other_domains_wherever_one_is_left(nodes: dict[str, str]) -> None:
    found = peer_of([Node(name, 1, "ready", domain) for name, domain in nodes.items()])
    domains = {name: domain or name for name, domain in nodes.items()}
    assert set(found) == (set(domains) if len(nodes) > 1 else set())
    assert all(node != peer for node, peer in found.items())
    within = [node for node, peer in found.items() if domains[node] == domains[peer]]
    most = max((list(domains.values()).count(domain) for domain in domains.values()), default=0)
    if most <= len(nodes) - most:
        assert not within, "every node could have had a partner elsewhere"
    else:
        assert len(within) <= most - (len(nodes) - most)


@FEW
@given(
    st.lists(members, unique=True).map(tuple),
    st.lists(members, unique=True, min_size=1),
    st.data(),
)
def test_who_stays_keeps_the_rank_and_everybody_has_one(
    previous: tuple[str, ...], ready: list[str], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(ready)))
    ranks = order_ranks(previous, [Member(name, "n") for name in ready], size)
    assert len(ranks) == len(set(ranks)) == size
    assert set(ranks) <= set(ready)
    for rank, name in enumerate(previous[:size]):
        if name in ready:
            assert ranks[rank] == name


@FEW
@given(
    st.dictionaries(node_names, st.integers(0, 3)),
    st.lists(node_names, max_size=5),
    st.integers(0, 6),
    st.sets(node_names),
)
def test_members_are_placed_within_capacity_and_as_many_as_there_is_room_for(
    capacity: dict[str, int], taken: list[str], wanted: int, avoid: set[str]
) -> None:
    placed = [Member(f"m{number}", node) for number, node in enumerate(taken)]
    chosen = place_members([Node(n, c, "ready") for n, c in capacity.items()], placed, wanted, frozenset(avoid))
    room = {node: max(0, most - taken.count(node)) for node, most in capacity.items()}
    assert len(chosen) == min(wanted, sum(room.values()))
    assert all(chosen.count(node) <= room.get(node, 0) for node in chosen)
    if set(chosen) & avoid:
        assert all(chosen.count(node) == room[node] for node in room if node not in avoid)
