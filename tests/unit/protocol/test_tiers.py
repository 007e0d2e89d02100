"""What can be restored, and from where."""

from __future__ import annotations

from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot, newest_restorable

NODE = NodeSnapshot("a7", 7, {0: ("n0", "n1"), 1: ("n1", "n0")})


def test_nothing_was_committed_so_nothing_can_be_restored() -> None:
    assert newest_restorable([], []) is None


def test_a_snapshot_survives_one_of_two_nodes_and_not_both() -> None:
    one = NODE.without("n0")
    assert one.places == {0: ("n1",), 1: ("n1",)}
    assert one.complete
    assert not one.without("n1").complete
    assert NODE.without("elsewhere") == NODE


def test_node_memory_comes_before_durable_storage_at_the_same_step_and_keeps_it_as_the_fallback() -> None:
    remote = RemoteSnapshot("a7", 7)
    order = newest_restorable([NODE], [remote, RemoteSnapshot("a1", 1)])
    assert order is not None
    assert (order.tier, order.step, order.attempt, order.remote) == ("node", 7, "a7", remote)
    assert order.reason == "node memory holds all of step 7"


def test_another_snapshot_is_no_fallback_for_the_one_in_memory() -> None:
    order = newest_restorable([NODE], [RemoteSnapshot("a5", 5)])
    assert order is not None
    assert order.node == NODE
    assert order.remote is None


def test_what_memory_lacks_is_named_when_an_older_one_is_taken() -> None:
    order = newest_restorable([NODE.without("n0").without("n1")], [RemoteSnapshot("a5", 5), RemoteSnapshot("a3", 3)])
    assert order is not None
    assert (order.tier, order.step) == ("remote", 5)
    assert order.reason == "node memory lacks the shares of ranks [0, 1] of step 7"


def test_newer_durable_storage_comes_before_older_memory() -> None:
    order = newest_restorable([NODE], [RemoteSnapshot("a9", 9)])
    assert order is not None
    assert (order.tier, order.step) == ("remote", 9)
    assert order.reason == "durable storage is newer than node memory (step 7)"


def test_an_incomplete_snapshot_alone_restores_nothing() -> None:
    assert newest_restorable([NODE.without("n0").without("n1")], []) is None


def test_a_fresh_cluster_restores_from_durable_storage() -> None:
    order = newest_restorable([], [RemoteSnapshot("a9", 9)])
    assert order is not None
    assert order.reason == "no snapshot is in node memory"
