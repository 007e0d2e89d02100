"""A rank that is slow by itself is named, and nobody else; where that is configured its node is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.cluster import TestCluster, when

from elastic.observe.history import journal_records
from elastic.storage.blob_store import open_store

FIRST_SLOW_STEP = 40


def test_a_slow_rank_is_named_once_it_is_slow_and_its_node_is_left_without_losing_a_step(
    cluster: TestCluster, trainer: Any, tmp_path: Path
) -> None:
    cluster.ensure(4)
    handle = trainer(
        name="slow",
        config={"step_s": 0.05, "toil": (1, 1, FIRST_SLOW_STEP, 0.3)},
        workers=(2, 3),
        failures={"straggler_window_s": 2.0, "straggler_factor": 2.0, "stragglers": "leave"},
    ).start()
    status = when(handle, lambda s: s["step"] >= FIRST_SLOW_STEP, 60, "the first slow step")
    slow_node = next(record for record in _journal(tmp_path) if record["kind"] == "begun")["nodes"][1]
    assert (status["stragglers"], status["alarms"]) == ([], []), "nobody was slow until then"

    status = when(handle, lambda s: s["notices"] and s["phase"] == "running", 90, "the node to be left")
    assert status["notices"][0]["by"] == "straggler"
    assert slow_node not in {member["node"] for member in status["members"].values()}
    quiet_from = status["step"]
    when(handle, lambda s: s["step"] >= quiet_from + 40, 60, "40 quick steps")
    handle.stop()
    result = handle.wait()

    assert (result.error, result.incidents, result.steps_lost) == (None, (), 0)
    (straggler,) = result.stragglers
    assert (straggler.rank, straggler.node, straggler.generation) == (1, slow_node, 1)
    assert straggler.worked_s > 0.29 > straggler.peers_s  # 0.3 s of toil, as the kernel counts it
    assert straggler.worked_s > 2 * straggler.peers_s
    assert any(record["kind"] == "straggler" for record in _journal(tmp_path))
    assert any(alarm.startswith("rank 1 on node ") for alarm in status["alarms"])


def _journal(storage: Path) -> list[dict[str, Any]]:
    return list(journal_records(open_store(str(storage)), "slow"))
