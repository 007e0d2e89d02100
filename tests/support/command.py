"""The ``elastic`` command as a terminal runs it: a process group of its own, Ctrl-C to all of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parent.parent.parent


class Command:
    """One command under way. ``shown`` is its stderr so far, ``printed`` its stdout, ``answer`` the object on the last
    line of that."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._out, self._err = (directory / f"{name}-{time.monotonic_ns()}" for name in ("out", "err"))
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elastic.cli.main", *arguments],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdout=out,
                stderr=err,
                start_new_session=True,
                # A shell starts what it runs in the background with SIGINT ignored, and that is handed down.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self._seen: dict[int, psutil.Process] = {}

    @property
    def shown(self) -> str:
        return self._err.read_text()

    @property
    def printed(self) -> str:
        return self._out.read_text()

    @property
    def answer(self) -> Any:
        return json.loads(self._out.read_text().splitlines()[-1])

    def shows(self, text: str, deadline_s: float) -> None:
        """Wait until stderr holds ``text``."""
        end = time.monotonic() + deadline_s
        while text not in self.shown:
            self._look()
            assert self.process.poll() is None, f"it ended before it showed {text!r}:\n{self.shown}"
            assert time.monotonic() < end, f"{deadline_s:g} s without {text!r}:\n{self.shown}"
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to every process of the terminal."""
        self._look()
        os.killpg(self.process.pid, signal.SIGINT)

    def ends(self, deadline_s: float) -> int:
        """Its exit code."""
        end = time.monotonic() + deadline_s
        while self.process.poll() is None:
            self._look()
            assert time.monotonic() < end, f"it has not ended in {deadline_s:g} s:\n{self.shown}"
            time.sleep(0.1)
        return int(self.process.returncode)

    def left(self, deadline_s: float = 5.0) -> list[str]:
        """Command lines of the processes it started that still live ``deadline_s`` after its end."""
        _, alive = psutil.wait_procs([p for p in self._seen.values() if _alive(p)], timeout=deadline_s)
        return [" ".join(process.cmdline()) for process in alive if _alive(process)]

    def _look(self) -> None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(child.pid, child)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextlib.contextmanager
def started(directory: Path, *arguments: str) -> Iterator[Command]:
    """The command for the block; what it started is ended after it."""
    command = Command(directory, *arguments)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.process.pid, signal.SIGKILL)
            command.process.wait()
        for process in command._seen.values():
            with contextlib.suppress(psutil.Error):
                process.kill()


def run(directory: Path, *arguments: str, deadline_s: float = 60.0) -> tuple[int, Command]:
    """The command to its end: (exit code, command)."""
    with started(directory, *arguments) as command:
        return command.ends(deadline_s), command


def arenas(name: str, directory: str = "/dev/shm") -> list[str]:
    """Arenas of the run ``name`` that lie in node memory."""
    return sorted(str(path) for path in Path(directory).glob(f"elastic-{name}-*"))
