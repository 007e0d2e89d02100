"""What an autoscaler is asked for, and when no more."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from elastic.protocol.demand import demand
from elastic.protocol.membership import ACTIVE, STARTING, Member, Node, Notice
from elastic.protocol.run_state import ENDED, FINISHING, RUNNING, Limits, RunState

LIMITS = Limits({"dp": -1}, 1, 4)


def state(members: int, nodes: int = 2, **fields: Any) -> RunState:
    return (
        RunState(
            LIMITS,
            phase=RUNNING,
            target=4,
            nodes={f"n{i}": Node(f"n{i}", 1, "ready") for i in range(nodes)},
            members={f"m{i}": Member(f"m{i}", f"n{i}", ACTIVE) for i in range(members)},
        )
        if not fields
        else replace(state(members, nodes), **fields)
    )


def test_a_run_that_lacks_ranks_asks_for_room_for_all_of_them() -> None:
    assert demand(state(2)) == 4
    assert demand(state(2, target=3)) == 3
    assert demand(state(2, limits=replace(LIMITS, hot_spares=1))) == 5


def test_once_everybody_has_a_place_the_request_is_taken_back_though_they_still_start() -> None:
    full = state(4, 4)
    assert demand(full) == 0
    assert demand(replace(full, members={**full.members, "m3": Member("m3", "n3", STARTING)})) == 0


def test_nodes_that_take_no_ranks_do_not_count_as_room() -> None:
    notice = Notice("n1", "exclude", "a user excluded it", 0.0, inf)
    assert demand(state(2, notices=(notice,))) == 5, "its rank has to go somewhere else"
    refused = state(2, 3)
    assert demand(replace(refused, nodes={**refused.nodes, "n2": Node("n2", 1, "refused")})) == 5


def test_a_run_that_ends_needs_nothing() -> None:
    assert demand(state(2, stop_asked=True)) == 0
    assert demand(state(2, phase=FINISHING)) == demand(state(2, phase=ENDED)) == 0
