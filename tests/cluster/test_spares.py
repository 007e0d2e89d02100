"""A warm rank that stands by takes a lost one's place, and what is dear to build is built once in a process."""

from __future__ import annotations

from pathlib import Path

from support.cluster import JOBS, TestCluster, when

import elastic


def test_a_hot_spare_takes_a_killed_ranks_place_and_another_one_warms_up(cluster: TestCluster, tmp_path: Path) -> None:
    cluster.ensure(4)
    handle = elastic.ElasticTrainer(
        f"{JOBS}:keeps",
        train_loop_config={"steps": 400, "step_s": 0.02, "faults": [("kill", 200, 1, 1)]},
        scaling_config=elastic.ScalingConfig(num_workers=2, hot_spares=1),
        run_config=elastic.RunConfig(name="spares", storage_path=str(tmp_path)),
    ).start()
    warm = lambda s: sorted(m["phase"] for m in s["members"].values()) == ["active", "active", "warm"]  # noqa: E731
    standing_by = when(handle, lambda s: s["generation"] == 1 and warm(s), 60, "a warm spare")
    replaced = when(handle, lambda s: s["incidents"] and warm(s), 60, "another warm spare")
    result = handle.wait()

    assert result.error is None
    assert [generation.world_size for generation in result.generations] == [2, 2]
    (incident,) = result.incidents
    assert (incident.rung, incident.steps_lost) == ("replace", 0)
    (spare,) = (name for name, member in standing_by["members"].items() if member["phase"] == "warm")
    assert replaced["members"][spare]["phase"] == "active"
    first, last = result.metrics[0], result.metrics[-1]
    assert (first["entries"], last["entries"]) == (1, 2)
    assert first["builder"] == last["builder"] == last["process"]
