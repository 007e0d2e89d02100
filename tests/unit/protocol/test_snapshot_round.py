"""One snapshot attempt: every order of every event that can reach it, and single stories worth reading."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest

from elastic.errors import InternalError
from elastic.protocol.machine import Machine
from elastic.protocol.shares import PointInTime, ShareReport, SlotRef
from elastic.protocol.snapshot_round import (
    ABANDONED,
    COMMITTED,
    LIVE,
    OPENING,
    PROPOSED,
    SEALING,
    TABLE,
    AbandonShares,
    Accepted,
    BoundaryNamed,
    CommitNodeTier,
    Confirm,
    EndReached,
    NameBoundary,
    OpenSlots,
    Passed,
    Propose,
    ReleaseRanks,
    RoundCancelled,
    RoundEnded,
    RoundState,
    ShareFailed,
    ShareSealed,
    SlotsOpened,
    SlotsRefused,
    StageLive,
    begin,
)

OVER = (COMMITTED, ABANDONED)


def round_of(ranks: int, *, purpose: str = "periodic", per_node: int = 1, step: int = -1) -> RoundState:
    nodes = {rank: f"n{rank // per_node}" for rank in range(ranks)}
    return RoundState("a1", purpose, 3, False, nodes, {}, dict.fromkeys(range(ranks), 100), step=step)


def slot(rank: int) -> SlotRef:
    return SlotRef(f"/{rank}", 100, rank)


def report(rank: int, step: int) -> ShareReport:
    return ShareReport("a1", rank, PointInTime(3, step), 100, "d", 0.0, {})


def sealed(rank: int, step: int) -> ShareSealed:
    return ShareSealed(report(rank, step), (f"n{rank}",))


def canonical(state: RoundState) -> tuple[Any, ...]:
    """What distinguishes states: the same for any order of arrival."""
    return (
        state.phase, state.step, frozenset(state.slots), state.furthest, state.margin, state.answered, state.passed,
        frozenset((rank, r.point.step) for rank, r in state.reports.items()), state.confirmed,
    )  # fmt: skip


def outstanding(state: RoundState, asked: frozenset[Any]) -> list[tuple[Any, frozenset[Any]]]:
    """Events that can come next, with what is still asked for afterwards. ``asked``: calls without an answer."""
    events: list[tuple[Any, frozenset[Any]]] = []
    for call in asked:
        rest = asked - {call}
        if isinstance(call, tuple) and call[0] == "open":
            events.append((SlotsOpened(f"n{call[1]}", {call[1]: slot(call[1])}), rest))
            events.append((SlotsRefused(f"n{call[1]}", "full"), rest))
        elif isinstance(call, tuple) and call[0] == "name":
            events.append((BoundaryNamed(call[1]), rest))
        elif isinstance(call, tuple) and call[0] == "propose":
            _, rank, step = call
            events += [(Accepted(rank, step), rest), (ShareFailed(rank, "it does not answer"), rest)]
            if step < 4:  # bounded: a rank runs at most so far ahead
                events.append((Passed(rank, step, step), rest))
        elif isinstance(call, tuple) and call[0] == "stage":
            _, rank, step = call
            events += [(sealed(rank, step), rest), (ShareFailed(rank, "not sealed"), rest)]
    events += [(RoundCancelled("a rank was lost"), asked), (EndReached(2), asked)]
    return events


def after(commands: tuple[Any, ...], asked: frozenset[Any], ranks: int, step: int) -> frozenset[Any]:
    added: set[Any] = set()
    for command in commands:
        if isinstance(command, OpenSlots):
            added |= {("open", rank) for rank in command.share_bytes}
        elif isinstance(command, NameBoundary):
            added.add(("name", max(command.at_least, 1)))
        elif isinstance(command, Propose):
            added.add(("propose", command.rank, command.step))
        elif isinstance(command, StageLive):
            added.add(("stage", command.rank, step))
        elif isinstance(command, Confirm):
            added |= {("stage", rank, command.step) for rank in range(ranks)}
    return asked | added


def explore(ranks: int, purpose: str) -> Counter[str]:
    """Visit every reachable (state, outstanding calls) and every edge between them. Counts edges by event."""
    start, commands = begin(round_of(ranks, purpose=purpose, step=7 if purpose == LIVE else -1))
    first = (start, after(commands, frozenset(), ranks, start.step))
    seen = {(canonical(start), first[1])}
    queue, edges = deque([first]), Counter[str]()
    while queue:
        state, asked = queue.popleft()
        for event, rest in outstanding(state, asked):
            machine = Machine("round", TABLE, state)
            commands = machine.handle(event)
            edges[type(event).__name__] += 1
            found = machine.state
            check(state, found, event, commands)
            key = (canonical(found), after(commands, rest, ranks, found.step))
            if key not in seen:
                seen.add(key)
                queue.append((found, key[1]))
    edges["states"] = len(seen)
    return edges


def check(before: RoundState, state: RoundState, event: Any, commands: tuple[Any, ...]) -> None:
    kinds = [type(command) for command in commands]
    if before.phase in OVER:
        assert state == before
        assert not commands
        return
    assert (RoundEnded in kinds) == (state.phase in OVER), "the end of a round is told once"
    assert (CommitNodeTier in kinds) == (state.phase == COMMITTED)
    assert (AbandonShares in kinds) == (ReleaseRanks in kinds) == (state.phase == ABANDONED)
    if state.phase == COMMITTED:
        assert set(state.reports) == state.ranks
        assert {r.point.step for r in state.reports.values()} == {state.step}
        assert set(state.places) == state.ranks
    if Confirm in kinds:
        assert state.answered == state.ranks
        assert not state.passed
    if state.phase == ABANDONED:
        assert state.reason


@pytest.mark.parametrize(("purpose", "ranks"), [("periodic", 3), ("final", 3), (LIVE, 4)])
def test_every_order_of_events_keeps_what_must_hold(purpose: str, ranks: int) -> None:
    edges = explore(ranks, purpose)
    print(f"{purpose}, {ranks} ranks: {edges.pop('states')} states, {sum(edges.values())} edges, {dict(edges)}")
    reached = {"SlotsOpened", "SlotsRefused", "ShareSealed", "ShareFailed", "RoundCancelled", "EndReached"}
    assert set(edges) == (reached if purpose == LIVE else reached | {"BoundaryNamed", "Accepted", "Passed"})


def play(state: RoundState, *events: Any) -> tuple[Machine[RoundState], list[Any]]:
    state, commands = begin(state)
    machine = Machine("round", TABLE, state)
    found = list(commands)
    for event in events:
        found += machine.handle(event)
    return machine, found


OPEN = (SlotsOpened("n0", {0: slot(0)}), SlotsOpened("n1", {1: slot(1)}))
AGREED = (*OPEN, BoundaryNamed(5), Accepted(0, 5), Accepted(1, 5))


def test_a_store_is_asked_once_for_the_slots_of_all_its_ranks() -> None:
    _, commands = begin(round_of(4, per_node=2))
    assert commands == (OpenSlots("n0", "a1", {0: 100, 1: 100}), OpenSlots("n1", "a1", {2: 100, 3: 100}))


def test_a_round_goes_from_slots_over_a_boundary_to_the_commit() -> None:
    machine, commands = play(round_of(2), *AGREED, sealed(1, 5), sealed(0, 5))
    assert machine.state.phase == COMMITTED
    assert [type(command) for command in commands] == [
        OpenSlots, OpenSlots, NameBoundary, Propose, Propose, Confirm, CommitNodeTier, RoundEnded,
    ]  # fmt: skip


def test_a_rank_that_has_passed_makes_the_controller_name_a_later_step_with_growing_margin() -> None:
    machine, commands = play(round_of(2), *OPEN, BoundaryNamed(5), Accepted(0, 5), Passed(1, 5, 9))
    assert machine.state.phase == PROPOSED
    assert commands[-1] == NameBoundary(9 + 2)
    machine.handle(BoundaryNamed(11))
    machine.handle(Accepted(0, 11))
    assert machine.handle(Passed(1, 11, 11)) == (NameBoundary(11 + 4),)


def test_an_answer_to_an_earlier_step_does_not_count() -> None:
    machine, _ = play(round_of(2), *OPEN, BoundaryNamed(5), Accepted(0, 5), Passed(1, 5, 9), BoundaryNamed(11))
    assert machine.handle(Accepted(0, 5)) == ()
    assert machine.state.answered == frozenset()


@pytest.mark.parametrize("purpose", ["entry", "final"])
def test_a_boundary_that_is_held_is_not_named_anew(purpose: str) -> None:
    machine, _ = play(round_of(2, purpose=purpose), *OPEN, BoundaryNamed(5), Accepted(0, 5), Passed(1, 5, 6))
    assert machine.state.phase == ABANDONED
    assert machine.state.reason == "ranks [1] are not at step 5 any more"
    assert not machine.state.confirmed


def test_the_end_of_a_round_tells_whether_ranks_may_have_left_the_boundary() -> None:
    assert not play(round_of(2), *OPEN, RoundCancelled("why"))[0].state.confirmed
    assert play(round_of(2), *AGREED, RoundCancelled("why"))[0].state.confirmed


def test_shares_of_two_steps_are_never_committed() -> None:
    machine, commands = play(round_of(2), *AGREED, sealed(0, 5), sealed(1, 6))
    assert machine.state.phase == ABANDONED
    assert "step differs: rank 0: 5; rank 1: 6" in machine.state.reason
    assert not any(isinstance(command, CommitNodeTier) for command in commands)


def test_shares_of_another_attempt_are_never_committed() -> None:
    foreign = replace(sealed(1, 5), report=replace(report(1, 5), attempt="a0"))
    machine, _ = play(round_of(2), *AGREED, sealed(0, 5), foreign)
    assert machine.state.phase == ABANDONED


def test_a_late_share_never_joins_a_committed_snapshot() -> None:
    machine, _ = play(round_of(2), *AGREED, sealed(0, 5), sealed(1, 5))
    with pytest.raises(InternalError, match="ShareSealed is not expected in phase committed"):
        machine.handle(sealed(0, 5))


def test_a_late_share_does_not_revive_an_abandoned_attempt() -> None:
    machine, _ = play(round_of(2), *AGREED, sealed(0, 5), ShareFailed(1, "disk full"))
    assert machine.state.reason == "rank 1: disk full"
    assert machine.handle(sealed(1, 5)) == ()
    assert machine.state.phase == ABANDONED


def test_all_stores_that_hold_anything_are_told_of_the_end() -> None:
    peers = {"n0": "n1", "n1": "n9"}
    machine, commands = play(replace(round_of(2), peers=peers), *AGREED, ShareFailed(1, "why"))
    assert machine.state.phase == ABANDONED
    assert AbandonShares("a1", ("n0", "n1", "n9")) in commands


@pytest.mark.parametrize(("events", "survives"), [(OPEN, False), (AGREED, True)])
def test_ranks_at_their_end_abandon_a_round_that_they_do_not_meet(events: tuple[Any, ...], survives: bool) -> None:
    machine, _ = play(round_of(2), *events, EndReached(5))
    assert machine.state.phase == (SEALING if survives else ABANDONED)
    beyond, _ = play(round_of(2), *events, EndReached(4))
    assert beyond.state.phase == ABANDONED


def test_survivors_of_a_failure_stage_what_they_kept_without_a_boundary_being_named() -> None:
    machine, commands = play(round_of(2, purpose=LIVE, step=7), *OPEN)
    assert commands[-2:] == [StageLive(0, "a1", slot(0)), StageLive(1, "a1", slot(1))]
    machine.handle(sealed(0, 7))
    assert any(isinstance(command, CommitNodeTier) for command in machine.handle(sealed(1, 7)))


def test_a_fresh_round_is_opening() -> None:
    assert begin(round_of(1))[0].phase == OPENING
