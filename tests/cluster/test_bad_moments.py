"""Failures at the moments that suit least, and several at once: each is survived, nothing is repeated or skipped."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from support.cluster import TestCluster, assert_audited, kill_process, when

from elastic.observe.history import journal_records
from elastic.storage.blob_store import open_store


def told(storage: Path, run: str, kind: str) -> list[dict[str, Any]]:
    """What the journal says of that kind."""
    return [record for record in journal_records(open_store(str(storage)), run) if record["kind"] == kind]


def working(ranks: int, incidents: int) -> Any:
    """Whether so many ranks train, after so many incidents."""
    return lambda s: s["phase"] == "running" and s["world_size"] == ranks and len(s["incidents"]) == incidents


def test_failures_before_the_first_snapshot_in_a_recovery_and_in_a_resize_and_of_two_nodes_at_once(
    cluster: TestCluster, trainer: Any, tmp_path: Path
) -> None:
    cluster.ensure(4)
    bomb = tmp_path / "bomb"
    config = {"entry_faults": [("kill", 0, 1, 1)], "entry_bomb": str(bomb), "step_s": 0.1}
    patient = {"wait_for_workers_s": 60.0}
    handle = trainer(name="moments", config=config, workers=(2, 4), interval="5 steps", failures=patient).start()
    status = when(handle, working(4, 1), 60, "a start after all")
    assert (status["incidents"][0]["kind"], status["incidents"][0]["restored_step"]) == ("rank", 0)

    kill_process(cluster.process("ray::Rendezvous").pid)
    controller = cluster.process("ray::Controller")
    controller.send_signal(signal.SIGTERM)
    controller.wait(10)
    step = handle.status(60.0)["step"]
    when(handle, lambda s: s["step"] > step and working(4, 1)(s), 30, "training to go on without either")

    bomb.write_text("kill")
    ranks, nodes = (told(tmp_path, "moments", "begun")[-1][key] for key in ("ranks", "nodes"))
    kill_process(cluster.process("ray::Rank", nodes[0]).pid)
    status = when(handle, working(4, 2), 60, "two failures to be one incident")
    assert not bomb.exists()
    assert (status["incidents"][1]["rank"], status["incidents"][1]["steps_lost"]) == (0, 0)
    assert ranks[0] not in status["members"]

    bomb.write_text("kill")
    handle.resize(2)
    status = when(handle, working(2, 3), 60, "a resize that had to be begun again")
    assert not bomb.exists()
    assert status["incidents"][2]["steps_lost"] == 0

    handle.resize(4)
    status = when(handle, working(4, 3), 60, "four ranks")
    for node in told(tmp_path, "moments", "begun")[-1]["nodes"][:2]:
        cluster.kill_node(node, "moments")
    status = when(handle, working(2, 4), 30, "two nodes fewer")
    assert (status["incidents"][3]["kind"], status["incidents"][3]["steps_lost"]) == ("node", 0)
    handle.stop()
    result = handle.wait()
    assert_audited(result)
    told_steps = [row["step"] for row in result.metrics]
    assert told_steps == list(range(1, result.step + 1)), "a rank 0 that is lost takes no row along"


def test_a_node_comes_back_from_its_partner_and_a_pair_of_partners_from_storage(
    cluster: TestCluster, trainer: Any, tmp_path: Path
) -> None:
    """Saved generators, so that survivors alone are not enough and every share of the lost nodes has to be found."""
    cluster.ensure(4)
    handle = trainer(
        name="partners",
        config={"step_s": 0.1},
        workers=(1, 4),
        interval="5 steps",
        failures={"wait_for_workers_s": 60.0},
        rng="saved",
        rng_on_resize="derive",
    ).start()
    when(handle, lambda s: (s["snapshot_remote_step"] or 0) >= 5, 60, "a durable snapshot")
    places = told(tmp_path, "partners", "committed")[-1]["places"]
    first, second = next(iter(places.values()))
    for node in (first, second):
        cluster.kill_node(node, "partners")
    status = when(handle, working(2, 1), 30, "the two that are left")
    assert (status["incidents"][0]["kind"], status["incidents"][0]["restored_from"]) == ("node", "remote")
    restored = status["step"]

    when(handle, lambda s: s["step"] > restored + 5 and s["snapshots"] > 2, 30, "another snapshot")
    lost = sorted(member["node"] for member in handle.status()["members"].values())[0]
    cluster.kill_node(lost, "partners")
    status = when(handle, working(1, 2), 30, "the last one")
    assert (status["incidents"][1]["kind"], status["incidents"][1]["restored_from"]) == ("node", "node")
    handle.stop()
    assert_audited(handle.wait())
