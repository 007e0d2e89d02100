"""Each finished step that counts has a row of metrics, whoever tells it."""

from __future__ import annotations

from dataclasses import replace

from elastic.mesh import MeshRule
from elastic.protocol.last_rows import LastRows, rows_owed
from elastic.protocol.membership import Member
from elastic.protocol.run_events import Departure
from elastic.protocol.run_state import ENDED, FORMING, GATHERING, RUNNING, UNWINDING, Limits, RunState
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot, RestoreOrder

RULE: MeshRule = {"dp": -1}


def ending(steps: dict[int, int], began: int = 0) -> RunState:
    """Generation 4 of three ranks, which left after so many steps; who is not named is lost."""
    state = RunState(Limits(RULE, 1, 3), phase=UNWINDING, generation=4, ranks=("a", "b", "c"))
    order = RestoreOrder(began, None, RemoteSnapshot("r", began), "") if began else None
    members = {name: Member(name, name) for rank, name in enumerate(state.ranks) if rank in steps}
    left = {rank: Departure(state.ranks[rank], rank, "interrupted", step, 9.0) for rank, step in steps.items()}
    return replace(state, members=members, departures=left, restoring=order)


def over(before: RunState, step: int) -> RunState:
    """What follows: everybody is free, and ``step`` can be restored from memory."""
    snapshot = NodeSnapshot("s", step, {0: ("b",)})
    return replace(before, phase=GATHERING, departures={}, node_snapshots=(snapshot,))


def test_of_a_lost_rank_0_another_tells_the_steps_that_count() -> None:
    before = ending({1: 20, 2: 20})
    owed = rows_owed(before, over(before, 20), noted=(4, 17))
    assert owed == LastRows(4, 17, 20, ((1, "b"), (2, "c")))


def test_rank_0_is_asked_first_and_then_who_came_furthest() -> None:
    before = ending({0: 19, 1: 19, 2: 20})
    owed = rows_owed(before, over(before, 20), noted=(4, 19))
    assert owed == LastRows(4, 19, 20, ((0, "a"), (2, "c"), (1, "b")))


def test_steps_that_are_lost_or_that_were_told_are_not_asked_for() -> None:
    before = ending({1: 20, 2: 20}, began=10)
    assert rows_owed(before, over(before, 10), noted=(3, 10)) is None, "it goes back to where it began"
    assert rows_owed(before, over(before, 15), noted=(4, 18)) is None, "it goes back behind what is known"
    assert rows_owed(before, over(before, 15), noted=(3, 10)) == LastRows(4, 10, 15, ((1, "b"), (2, "c")))


def test_it_is_asked_once_a_generation_when_that_is_over() -> None:
    before = ending({1: 20, 2: 20})
    gathering = over(before, 20)
    begun = replace(gathering, phase=FORMING, generation=5)
    assert rows_owed(replace(before, phase=RUNNING), before, (4, 17)) is None
    assert rows_owed(gathering, begun, (4, 17)) is None
    assert rows_owed(before, begun, (4, 17)) == rows_owed(before, gathering, (4, 17))
    assert rows_owed(before, replace(gathering, phase=ENDED), (4, 17)) is not None
    assert rows_owed(before, replace(gathering, node_snapshots=()), (4, 17)) is None, "nothing can be restored"
