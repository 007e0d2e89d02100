"""The GPU check says so where it cannot be run, and what it compares is tried on the CPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("gpu_snapshot.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: run the script itself")
def test_without_cuda_it_ends_with_one_sentence() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, cwd=SCRIPT.parents[2])
    assert (done.returncode, done.stderr) == (77, "")
    assert done.stdout == "There is no CUDA device here: the GPU snapshot check was not run.\n"


def test_its_comparison_finds_no_difference_on_the_cpu_and_sees_one_that_is_made(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gpu_snapshot", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    training = check.Training(torch.device("cpu"), 1, tmp_path / "arena")
    try:
        assert check.differences(training, 2) == 0
        late = training.stage

        def stage_after_the_next_step(number: int) -> int:
            training.step()
            return int(late(number))

        training.stage = stage_after_the_next_step
        assert check.differences(training, 1) > len(list(training.model.parameters()))
    finally:
        training.close()
