"""``elastic snapshots verify --resume``: the next steps from a snapshot, in fresh processes, on two meshes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.made_run import RUN, commit_minimal
from typer.testing import CliRunner

from elastic.cli.main import build
from elastic.storage.local_blobs import LocalBlobs

MINIMAL = str(Path(__file__).parents[2] / "examples" / "minimal.py") + ":train"


def verify(storage: Path, *words: str) -> tuple[int, str]:
    arguments = ["snapshots", "verify", "--storage", str(storage), "--run", RUN, "--resume", *words]
    done = CliRunner().invoke(build(), arguments)
    return done.exit_code, done.stdout


def test_a_good_snapshot_resumes_on_its_own_mesh_and_on_another(tmp_path: Path) -> None:
    commit_minimal(tmp_path / "arena", LocalBlobs(tmp_path / "storage"), steps=5)
    report = tmp_path / "report.json"
    code, out = verify(tmp_path / "storage", MINIMAL, "--json", "--report", str(report))
    answer = json.loads(out.splitlines()[-1])
    failed = [check for check in answer["checks"] if check["ok"] is False]
    assert (code, answer["verdict"], failed) == (0, "resumes", [])
    assert answer["meshes"] == ["dp2", "dp1"]
    made = {check["what"] for check in answer["checks"] if check["ok"]}
    assert made >= {
        "parameters and optimizer state", "optimizer step", "data cursor", "token cursor", "loader state",
        "sample ids", "loss", "outputs of model", "gradient norm", "next update", "counters", "generators",
    }  # fmt: skip
    assert json.loads(report.read_text())["checks"] == answer["checks"]


TEACHER = """
import copy
import torch
import elastic
from torch.nn.parallel import DistributedDataParallel

def train(config):
    run = elastic.current_run()
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    teacher = copy.deepcopy(model.module).requires_grad_(False)  # an average of past models that is not attached
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = elastic.ElasticLoader(dataset, global_batch_size=64, seed=17)
    run.attach(model=model, optimizer=optimizer, loader=loader)
    for inputs, targets in run.steps(loader, until_step=9):
        outputs = model(inputs)
        loss = ((outputs - targets) ** 2 + (outputs - teacher(inputs)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for ours, theirs in zip(teacher.parameters(), model.parameters()):
            ours.lerp_(theirs.detach(), 0.1)
        run.report(loss=loss)
"""


def test_the_next_steps_are_those_that_the_run_itself_told_of(tmp_path: Path) -> None:
    commit_minimal(tmp_path / "arena", LocalBlobs(tmp_path / "storage"), steps=5, then=3)
    code, out = verify(tmp_path / "storage", MINIMAL, "--json")
    answer = json.loads(out.splitlines()[-1])
    with_the_run = {check["what"]: check["ok"] for check in answer["checks"] if check["where"] == "dp2 and the run"}
    assert (code, with_the_run) == (0, {"sample ids": True, "loss": True})


def test_state_that_was_never_attached_is_found_by_the_losses_of_the_run(tmp_path: Path) -> None:
    commit_minimal(tmp_path / "arena", LocalBlobs(tmp_path / "storage"), steps=5, then=3, pull=1.0)
    script = tmp_path / "teacher.py"
    script.write_text(TEACHER)
    code, out = verify(tmp_path / "storage", f"{script}:train")
    assert code == 5
    failed = [line for line in out.splitlines() if line.startswith("  FAILED:")]
    assert len(failed) == 1
    assert failed[0].startswith("  FAILED: loss on dp2 and the run: ")


def test_a_snapshot_that_is_not_what_it_says_does_not_resume(tmp_path: Path) -> None:
    commit_minimal(tmp_path / "arena", LocalBlobs(tmp_path / "storage"), steps=5, damage=True)
    code, out = verify(tmp_path / "storage", MINIMAL, "--steps", "1", "--tolerance", "update=0")
    assert code == 5
    assert "FAILED: data cursor on dp2: 320, saved 384" in out
    assert "verdict: DOES NOT RESUME as it should" in out


def test_a_train_function_that_raises_ends_with_its_own_traceback_and_code_3(tmp_path: Path) -> None:
    commit_minimal(tmp_path / "arena", LocalBlobs(tmp_path / "storage"), steps=5, ranks=1)
    script = tmp_path / "broken.py"
    script.write_text("def train(config):\n    raise ZeroDivisionError('before anything')\n")
    code, _ = verify(tmp_path / "storage", f"{script}:train")
    assert code == 3


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((MINIMAL, "--steps", "0"), 2),
        ((MINIMAL, "--mesh", "dp=-1"), 2),
        ((MINIMAL, "--mesh", "dp=64"), 2),
        ((MINIMAL, "--tolerance", "loss"), 2),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_started(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    commit_minimal(tmp_path / "arena", LocalBlobs(tmp_path / "storage"), steps=1)
    assert verify(tmp_path / "storage", *words)[0] == code
