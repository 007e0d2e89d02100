"""The command line without a cluster: what it refuses, how, and what it does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic.cli.local_runs import announced, local_runs
from elastic.cli.main import COMMANDS, build
from elastic.cli.output import finite, seconds


def test_help_names_every_command_and_exit_code() -> None:
    shown = CliRunner().invoke(build(), ["--help"])
    assert shown.exit_code == 0
    for word in (*COMMANDS, "130", "93"):
        assert word in shown.output


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["tune", "--mtbf", "6h", "--cost", "3s"]])
def test_neither_ray_nor_torch_is_loaded_before_it_is_needed(arguments: list[str]) -> None:
    code = (
        "import sys; sys.argv = ['elastic', *sys.argv[1:]]\n"
        "from elastic.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print(sorted({'ray', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_wrong_call_is_one_sentence_and_exit_code_2() -> None:
    shown = CliRunner().invoke(build(), ["run", "x.py:f", "--workers", "4:2"])
    assert shown.exit_code == 2
    assert shown.stderr == "error: num_workers = (4, 2): the minimum 4 is above the maximum 2; swap them\n"
    assert shown.stdout == ""


def test_with_json_an_error_is_an_object_on_the_last_line() -> None:
    shown = CliRunner().invoke(build(), ["run", "--detach", "x.py:f", "--json"])
    found = json.loads(shown.stdout.splitlines()[-1])
    assert found["error"]["type"] == "ConfigError"
    assert "--address" in found["error"]["text"]
    assert found["exit_code"] == shown.exit_code == 2


def test_a_run_is_found_by_another_process_while_it_is_announced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with announced("r", "/storage", "127.0.0.1:1"):
        (found,) = local_runs()
        assert (found.run, found.storage, found.address, found.pid) == ("r", "/storage", "127.0.0.1:1", os.getpid())
    assert local_runs() == []


def test_the_run_of_a_process_that_is_gone_counts_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with announced("r", "/storage", "127.0.0.1:1"):
        (mine,) = (tmp_path / f"ray-elastic-{os.getuid()}").iterdir()
        record = mine.read_text().replace(str(os.getpid()), str(gone.pid))
        (mine.parent / f"{gone.pid}.json").write_text(record)
        assert [found.pid for found in local_runs()] == [os.getpid()]


def test_what_is_no_number_in_json_becomes_null() -> None:
    assert finite({"a": [float("nan"), 1.5], "b": (float("inf"), "x")}) == {"a": [None, 1.5], "b": [None, "x"]}


def test_durations_are_told_in_the_unit_that_suits_them() -> None:
    assert [seconds(s) for s in (0.0000042, 0.0123, 1.234, 90.0, 600.0, 7201.0)] == [
        "4 µs",
        "12.3 ms",
        "1.23 s",
        "90 s",
        "10 min",
        "2 h",
    ]
