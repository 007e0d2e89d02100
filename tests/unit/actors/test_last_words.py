"""A process leaves word of how it ended, and its children do not speak for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actors.last_words import LastWords, read_last_words


@pytest.mark.parametrize(
    ("end", "exit_code", "signal"),
    [
        ("os._exit(3)", 3, None),
        ("os.kill(os.getpid(), 9)", None, None),
        ("os.kill(os.getpid(), 11)", None, 11),
        ("pid = os.fork()\nif not pid: os._exit(5)\nos.waitpid(pid, 0)\nos.kill(os.getpid(), 9)", None, None),
    ],
)
def test_an_end_is_told(tmp_path: Path, end: str, exit_code: int | None, signal: int | None) -> None:
    path = tmp_path / "words"
    code = f"import os\nfrom actors.last_words import leave_last_words\nleave_last_words({str(path)!r})\n{end}"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, stderr=subprocess.DEVNULL)
    words = read_last_words(str(path))
    assert (words.exit_code, words.signal) == (exit_code, signal)
    assert ('File "<string>"' in words.traceback) == (signal is not None)
    assert not path.exists()


def test_no_word_is_no_word(tmp_path: Path) -> None:
    assert read_last_words(str(tmp_path / "none")) == LastWords()
