"""What a process leaves behind of how it ended, for the store of its node to read.

Ray knows that a worker is gone, but neither an ``os._exit`` nor the signal of a crash. So a rank writes its exit code
and, through faulthandler, the Python stack of a crash to a file; who finds it empty knows that the process was killed
from outside. Whether that was the kernel, short of memory, is told by its count of such kills.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}


@dataclass(frozen=True, slots=True)
class LastWords:
    """Exit code, or the signal of a crash with the Python stacks; nothing of both for a process that was killed."""

    exit_code: int | None = None
    signal: int | None = None
    traceback: str = ""


def leave_last_words(path: str) -> None:
    """From now on this process leaves word in ``path`` of how it ends. Its children do not."""
    with contextlib.suppress(OSError):
        words = open(path, "w")  # noqa: SIM115  it stays open as long as the process
        faulthandler.enable(words, all_threads=True)
        own, leave = os.getpid(), os._exit

        def exit_with_word(status: int) -> NoReturn:
            if os.getpid() == own:
                with contextlib.suppress(OSError, ValueError):
                    words.write(f"exit {status}\n")
                    words.flush()
            leave(status)

        os._exit = exit_with_word


def read_last_words(path: str) -> LastWords:
    """What was left in ``path``, which is removed."""
    try:
        text = Path(path).read_text(errors="replace")
        os.unlink(path)
    except OSError:
        return LastWords()
    if fatal := _FATAL.search(text):
        return LastWords(signal=_SIGNALS.get(fatal[1].strip()), traceback=text.strip())
    code = re.fullmatch(r"exit (-?\d+)", text.strip())
    return LastWords(exit_code=int(code[1])) if code else LastWords()


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory: in this control group, or anywhere it can see."""
    count = 0
    for path, key in (
        ("/sys/fs/cgroup/memory.events", "oom_kill"),
        ("/sys/fs/cgroup/memory/memory.oom_control", "oom_kill"),
        ("/proc/vmstat", "oom_kill"),
    ):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    count = max(count, int(value))
    return count
