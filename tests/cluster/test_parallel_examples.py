"""Each example of a sharded model, on one mesh and then, from its snapshot, on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cluster import TestCluster

import elastic

EXAMPLES = Path(__file__).parents[2] / "examples"

MESHES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "fsdp2": ({"dp": 3}, {"dp": 2}),
    "fsdp2_tensor_parallel": ({"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}),
    "pipeline": ({"dp": 1, "pp": 2}, {"dp": 1, "pp": 4}),
    "experts": ({"ep": 2}, {"ep": 3}),
    "context_parallel": ({"dp": 1, "cp": 2}, {"dp": 2, "cp": 2}),
}


def test_every_example_is_run() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    assert found == {*MESHES, "minimal"}


@pytest.mark.parametrize("name", MESHES)
def test_the_example_learns_and_goes_on_on_another_mesh(cluster: TestCluster, tmp_path: Path, name: str) -> None:
    cluster.ensure(4)
    losses: list[list[Any]] = []
    for mesh, steps in zip(MESHES[name], (30, 60)):
        ranks = 1
        for size in mesh.values():
            ranks *= size
        result = elastic.ElasticTrainer(
            f"{EXAMPLES}/{name}.py:train",
            train_loop_config={"steps": steps},
            scaling_config=elastic.ScalingConfig(num_workers=ranks, mesh=mesh),
            run_config=elastic.RunConfig(name=name, storage_path=str(tmp_path)),
        ).fit()
        assert result.error is None
        assert (result.status, result.step) == ("finished", steps)
        losses.append([row["loss"] for row in result.metrics])
    assert result.generations[0].restored_step == 30
    first, last = (sum(part) / 10 for part in (losses[0][:10], losses[1][-10:]))
    assert last < 0.9 * first
