"""The Python stacks of another process of this machine, without its help: by py-spy, which comes with ray[default].

The process is not paused: who is dumped stands still anyway, and one that is stopped could not be paused again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 5.0


def py_spy() -> str | None:
    """Where py-spy is, if it is installed: beside our Python, or on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def dump(pid: int) -> str:
    """The stacks of all threads of ``pid``; empty where they cannot be had."""
    program = py_spy()
    if program is None:
        return ""
    command = [program, "dump", "--pid", str(pid), "--nonblocking", "--full-filenames"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
