"""Every benchmark runs, and prints what it promises: a table, and one JSON object with its keys on the last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KEYS = {
    "step_overhead": {"us_per_step"},
    "stall": {"over_memcpy", "over_dcp_async", "over_dcp_stager"},
    "plan_scale": {"plan_s", "peak_bytes", "chunks"},
    "restore_memory": {"extra_bytes"},
    "reshard": {"speedup", "peak_bytes"},
    "save_load": {"save_speedup", "load_speedup"},
    "incremental": {"uploaded_over_changed", "unchanged_speedup"},
    "transport": {"over_ray", "transports"},
    "leaks": {"grown_files", "grown_shm_bytes", "grown_bytes"},
    "interference": {"kept"},
    "online_interval": {"worst_points", "most_changes"},
    "interval_models": {"worst_z"},
    "recovery": {"rank_kill"},
    "goodput": {"ours", "ray_train"},
}
NO_SCRIPTS = {"engine_run", "failing_runs", "step_log", "toy_job"}
"""Parts that the scripts share."""


def test_every_benchmark_is_tried_here() -> None:
    scripts = {path.stem for path in HERE.glob("*.py") if not path.stem.startswith("test_")}
    assert scripts - NO_SCRIPTS == set(KEYS)


@pytest.mark.parametrize("name", KEYS)
def test_a_quick_run_prints_its_keys(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), "--quick", "--json"],
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *table, last = done.stdout.rstrip().splitlines()
    assert KEYS[name] <= set(json.loads(last))
    assert len(table) >= 3
