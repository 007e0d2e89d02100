"""Whom a reader asks: itself, then the other holders in turn, evenly; nobody that is lost."""

from __future__ import annotations

import numpy as np

from elastic.snapshot.object_names import node_pack
from elastic.snapshot.source_choice import NOWHERE, SourceChoice

PACKS = [node_pack("g1-a1", rank) for rank in range(100)]
EVERY = np.arange(100, dtype=np.int32)


def choice(places: dict[int, tuple[str, ...]], reader: str) -> SourceChoice:
    return SourceChoice(PACKS, places, reader)


def names(found: SourceChoice, turn: int) -> list[str | None]:
    return [None if node == NOWHERE else found.nodes[node] for node in found.choose(EVERY, turn).tolist()]


def test_what_lies_on_the_own_node_is_read_there_and_only_then_elsewhere() -> None:
    found = choice(dict.fromkeys(range(100), ("a", "b")), "b")
    assert names(found, 0) == ["b"] * 100
    assert names(found, 1) == ["a"] * 100
    assert names(found, 2) == [None] * 100


def test_reads_are_balanced_over_the_replicas() -> None:
    found = choice(dict.fromkeys(range(100), ("a", "b", "c")), "elsewhere")
    turns = [names(found, turn) for turn in range(3)]
    for turn in turns:
        assert all(32 <= turn.count(node) <= 34 for node in "abc")
    assert all(len(set(asked)) == 3 for asked in zip(*turns)), "each holder is asked once"


def test_readers_do_not_all_ask_the_same_holder_for_a_pack() -> None:
    places = dict.fromkeys(range(100), ("a", "b"))
    assert {choice(places, f"n{i}").choose(EVERY[:1])[0] for i in range(10)} == {1, 2}


def test_a_share_that_no_node_holds_is_left_to_durable_storage() -> None:
    found = choice({rank: () if rank % 2 else ("a",) for rank in range(100)}, "b")
    assert names(found, 0) == ["a", None] * 50
    assert choice({}, "b").choose(EVERY).tolist() == [NOWHERE] * 100


def test_chunks_follow_their_packs() -> None:
    found = choice({rank: (f"n{rank}",) for rank in range(100)}, "b")
    assert [found.nodes[i] for i in found.choose(np.array([7, 3, 7], np.int32))] == ["n7", "n3", "n7"]
