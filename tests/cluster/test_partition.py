"""Nodes whose network is cut without a word to anybody, and one whose network is slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.apart import Apart, apart
from support.cluster import until
from support.network import why_not

import elastic

NODES = 3
FOUND_S = 5.0
"""By default."""
FENCE_S = 10.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    if reason := why_not():
        pytest.skip(reason)
    with apart(tmp_path_factory.mktemp("apart"), NODES) as made:
        yield made


def trains_with(world_size: int) -> Any:
    return lambda status: status["world_size"] == world_size and status["phase"] == "running"


def of_member(nodes: Apart, status: dict[str, Any], index: int) -> str:
    """The address of the node of the first (0) or youngest (-1) member."""
    return nodes.address_of(sorted(status["members"].items())[index][1]["node"])


def test_a_node_that_is_cut_off_is_found_fences_itself_and_is_used_again_when_it_is_back(
    nodes: Apart, tmp_path: Path
) -> None:
    run = nodes.start(
        "cut",
        tmp_path,
        {"step_s": 0.05},
        workers=(NODES - 1, NODES),
        failures=elastic.FailureConfig(fence_timeout_s=FENCE_S),
    )
    status = run.when(lambda s: s["step"] >= 10 and trains_with(NODES)(s), 120, "step 10")

    # One comes back before it has noticed that it was cut off: what is left of its ranks is refused, and ended.
    address = of_member(nodes, status, -1)
    left = nodes.actors(address)
    assert len(left) == 2, "a rank and a store"
    nodes.network.cut(address)
    run.when(lambda s: trains_with(NODES - 1)(s) and s["incidents"], 20, "the others to go on")
    nodes.network.heal(address)
    until(lambda: not left & nodes.actors(address), 30, "the old rank and store to end")
    status = run.when(trains_with(NODES), 60, "the node to be used again")
    status = run.when(lambda s: s["step"] >= status["step"] + 10, 30, "ten more steps")

    # Another is cut off for longer: its rank and its store end by themselves, in the dark.
    address = of_member(nodes, status, 0)
    left = nodes.actors(address)
    nodes.network.cut(address)
    until(lambda: not left & nodes.actors(address), 2 * FENCE_S, "the rank and the store to end themselves")
    nodes.network.heal(address)
    run.when(lambda s: trains_with(NODES)(s) and len(s["incidents"]) == 2, 60, "the node to be used again")

    result = run.stop()
    assert result.error is None
    assert [g.world_size for g in result.generations] == [NODES, NODES - 1, NODES, NODES - 1, NODES]
    assert [(i.kind, i.rung, i.restored_from, i.steps_lost) for i in result.incidents] == [
        ("node", "shrink", "live", 0)
    ] * 2, [i.not_live for i in result.incidents]
    for incident in result.incidents:
        assert "has been silent for" in incident.why
        assert incident.split["detect_s"] <= FOUND_S + 1.0
    assert [row["step"] for row in result.metrics] == list(range(1, result.step + 1))
    found = run.audit().audit
    assert (found.steps, found.repeated, found.skipped, found.faults) == (result.step, 0, 0, ())


def test_a_node_behind_a_slow_link_is_slow_and_not_lost(nodes: Apart, tmp_path: Path) -> None:
    run = nodes.start(
        "slow",
        tmp_path,
        {"step_s": 0.02, "width": 256},
        workers=NODES,
        snapshots=elastic.SnapshotConfig(interval=1.0),
    )
    before = run.when(lambda s: s["step"] >= 10, 120, "step 10")
    address = of_member(nodes, before, -1)
    nodes.network.slow(address, kilobits_per_s=4000)
    held_back = nodes.network.held_back(address)
    seen = run.status()["step"]
    during = run.when(lambda s: s["step"] >= seen + 10, 60, "steps through the slow link")
    assert nodes.network.held_back(address) > held_back + 100
    nodes.network.fast(address)
    run.when(lambda s: s["step"] >= during["step"] + 10, 30, "steps at the old pace")

    result = run.stop()
    assert result.error is None
    assert (len(result.generations), result.incidents) == (1, ())
    assert [row["step"] for row in result.metrics] == list(range(1, result.step + 1))
    slow = [row["step_s"] for row in result.metrics if seen + 1 < row["step"] <= during["step"]]
    fast = [row["step_s"] for row in result.metrics if 1 < row["step"] <= before["step"]]
    assert sorted(slow)[len(slow) // 2] > 3 * sorted(fast)[len(fast) // 2]
    found = run.audit().audit
    assert (found.steps, found.repeated, found.skipped, found.faults) == (result.step, 0, 0, ())
