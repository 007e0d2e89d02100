"""Who is in the run and where: the pure choices."""

from __future__ import annotations

import pytest

from elastic.mesh import Mesh
from elastic.protocol.membership import (
    STARTING,
    Member,
    Node,
    choose_mesh,
    order_ranks,
    peer_of,
    place_members,
    smallest,
)


def nodes(*names: str, capacity: int = 2, domain: str = "") -> list[Node]:
    return [Node(name, capacity, "ready", domain or name) for name in names]


def warm(*names: str, node: str = "n") -> list[Member]:
    return [Member(name, node, "warm") for name in names]


def test_the_largest_mesh_is_chosen_and_the_reason_says_what_was_taken_of_what() -> None:
    assert choose_mesh({"dp": -1}, 2, 8, 5) == (Mesh((("dp", 5),)), "all 5 ready ranks form dp5")
    mesh, reason = choose_mesh({"dp": -1, "tp": 2}, 2, 6, 7)
    assert mesh == Mesh((("dp", 3), ("tp", 2)))
    assert reason == "dp3·tp2 takes 6 of 7 ready ranks; at most 6 are wanted"


def test_ranks_that_no_mesh_takes_stay_spare_and_the_reason_says_what_the_next_one_needs() -> None:
    rule = ({"dp": 4, "tp": 2}, {"dp": 2, "tp": 2}, {"dp": 2})
    assert choose_mesh(rule, 1, 8, 8)[1] == "all 8 ready ranks form dp4·tp2"
    mesh, reason = choose_mesh(rule, 1, 8, 7)
    assert mesh == Mesh((("dp", 2), ("tp", 2)))
    assert reason == ("dp2·tp2 takes 4 of 7 ready ranks, 3 stay spare: the next larger mesh, dp4·tp2, needs 8")
    assert choose_mesh(rule, 1, 8, 3)[1] == (
        "dp2 takes 2 of 3 ready ranks, 1 stays spare: the next larger mesh, dp2·tp2, needs 4"
    )
    assert choose_mesh(rule, 1, 12, 9)[1] == (
        "dp4·tp2 takes 8 of 9 ready ranks, 1 stays spare: no mesh that is allowed is larger"
    )
    assert choose_mesh(rule, 3, 8, 3) == (None, "3 ranks are ready and the smallest mesh needs 4")


def test_too_few_ranks_make_no_mesh_and_the_reason_names_the_smallest() -> None:
    assert choose_mesh({"dp": -1, "tp": 2}, 1, 8, 1) == (None, "1 ranks are ready and the smallest mesh needs 2")
    assert choose_mesh({"dp": -1}, 3, 8, 2) == (None, "2 ranks are ready and the smallest mesh needs 3")
    assert smallest({"dp": -1, "tp": 3}, 2, 8) == 3


def test_new_members_go_to_the_emptiest_node() -> None:
    assert place_members(nodes("a", "b"), [], 3, frozenset()) == ["a", "b", "a"]
    assert place_members(nodes("a", "b"), warm("m0", node="a"), 2, frozenset()) == ["b", "a"]


def test_a_node_where_one_was_lost_comes_last_but_is_used_where_there_is_no_other() -> None:
    assert place_members(nodes("a", "b"), [], 3, frozenset({"a"})) == ["b", "b", "a"]
    assert place_members(nodes("a"), [], 1, frozenset({"a"})) == ["a"]


def test_no_member_is_placed_beyond_capacity_or_where_nothing_can_be_staged() -> None:
    full = warm("m0", "m1", node="a")
    assert place_members(nodes("a"), full, 1, frozenset()) == []
    for node in (Node("a", 2, ""), Node("a", 2, "starting"), Node("a", 2, "refused"), Node("a", 0, "ready"),
                 Node("a", 2, "ready", refused=True)):  # fmt: skip
        assert place_members([node], [], 1, frozenset()) == [], node


def test_members_that_stay_keep_their_ranks_and_newcomers_fill_the_gaps() -> None:
    assert order_ranks(("a", "b", "c"), warm("c", "a", "x"), 3) == ("a", "x", "c")
    assert order_ranks(("a", "b"), warm("a", "b", "x", "y"), 4) == ("a", "b", "x", "y")


def test_on_fewer_ranks_who_is_beyond_the_end_moves_down_before_newcomers_are_taken() -> None:
    assert order_ranks(("a", "b", "c", "d"), warm("a", "c", "d", "x"), 3) == ("a", "d", "c")
    assert order_ranks(("a", "b", "c"), warm("b", "c"), 2) == ("c", "b")


def test_newcomers_of_one_node_are_neighbours() -> None:
    ready = [Member("m1", "b"), Member("m2", "a"), Member("m3", "b"), Member("m4", "a")]
    assert order_ranks((), ready, 4) == ("m2", "m4", "m1", "m3")


@pytest.mark.parametrize("count", range(2, 12))
def test_peers_are_others_in_pairs_with_at_most_one_odd_node(count: int) -> None:
    found = peer_of(nodes(*(f"n{number:02d}" for number in range(count))))
    assert set(found) == {f"n{number:02d}" for number in range(count)}
    assert all(node != peer for node, peer in found.items())
    one_way = [node for node, peer in found.items() if found[peer] != node]
    assert len(one_way) == count % 2


def test_a_peer_lies_in_another_failure_domain_where_there_is_one() -> None:
    racks = [*nodes("a", "b", domain="r1"), *nodes("c", "d", domain="r2")]
    found = peer_of(racks)
    assert all((node in "ab") != (peer in "ab") for node, peer in found.items())
    assert peer_of(nodes("a", "b", domain="r1")) == {"a": "b", "b": "a"}


def test_pairs_across_domains_are_found_though_the_first_would_take_the_others_partner() -> None:
    racks = [*nodes("a", domain="r1"), *nodes("b", domain="r2"), *nodes("c", "d", domain="r3")]
    domain = {"a": "r1", "b": "r2", "c": "r3", "d": "r3"}
    assert all(domain[node] != domain[peer] for node, peer in peer_of(racks).items())


def test_an_odd_node_out_finds_a_peer_in_another_domain() -> None:
    racks = [*nodes("a", "e", domain="r1"), *nodes("b", domain="r2")]
    domain = {"a": "r1", "b": "r2", "e": "r1"}
    assert all(domain[node] != domain[peer] for node, peer in peer_of(racks).items())


def test_one_node_has_no_peer() -> None:
    assert peer_of(nodes("a")) == {}
    assert peer_of([]) == {}


def test_a_member_begins_by_starting() -> None:
    assert Member("m", "n").phase == STARTING
