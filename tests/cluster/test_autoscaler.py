"""A run that lacks nodes asks Ray's autoscaler for them, and takes the request back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.command import arenas


def test_the_autoscaler_adds_the_node_that_is_missing_and_is_asked_for_nothing_after_the_run(tmp_path: Path) -> None:
    """With a cluster of its own, so in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("growing_cluster.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == "stopped"
    assert told["world_sizes"][-1] == 2
    assert told["steps_lost"] == 0
    assert told["asked"] == [[2, {"CPU": 1}], [0, {"CPU": 1}]]
    assert told["left"] == [[], 0], "the request, and what runs lack"
    assert arenas("growing") == []
