"""Each example is run as its first lines say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.fixture(autouse=True)
def no_other_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example starts a cluster of its own, whatever else runs on this machine."""
    monkeypatch.setitem(ENVIRONMENT, "RAY_ADDRESS", "local")


def test_the_minimal_example_runs_as_a_script(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "minimal.py").read_text()
    script = tmp_path / "minimal.py"
    script.write_text(text.replace("/tmp/runs", str(tmp_path / "runs")))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("finished 200 ")


def test_the_minimal_example_runs_by_name_and_resumes(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "minimal.py", tmp_path)
    command = [sys.executable, "-m", "elastic.cli.main", "run", "minimal.py:train", "--workers", "1:2"]
    command += ["--storage", str(tmp_path / "runs"), "--name", "minimal", "--json"]
    for steps in (60, 90):
        done = subprocess.run(
            [*command, "--set", f"steps={steps}"],
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        result = json.loads(done.stdout.splitlines()[-1])
        assert (result["status"], result["step"]) == ("finished", steps)
    assert result["generations"][0]["restored_step"] == 60
