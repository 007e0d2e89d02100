"""How long the train thread of this process has worked, as opposed to waiting for other ranks.

Work is what the kernel counts of the thread: the time that it ran, and that it was ready to run and had no core. Time
that it slept is work as well, unless it slept in a collective: reading a file, or waiting for the loader, is no wait
for a peer. Which of the two it was is sampled, by the innermost Python frame; the rest is exact. Nothing of this is on
the train thread's own path: another thread looks, a few times a second.

With CUDA this is the host's part of the work: a device that is slow makes its host wait as a slow peer would.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

from elastic.clock import now
from elastic.progress import BOUNDARY, LOADING, STEP
from elastic.protocol.hangs import is_collective

COUNTED = (STEP, LOADING, BOUNDARY)
"""Phases of a step like every other; not the first one, which compiles, nor what is called by a name of its own."""
MAY_SLEEP = (STEP, LOADING)
_DISPATCH = os.path.join("torch", "_ops.py")


class OwnWork:
    """``look`` from one thread, at least once a second."""

    def __init__(self) -> None:
        self.worked_s = 0.0
        self._thread: threading.Thread | None = None
        self._place = ""
        self._before: tuple[float, float, str] = (0.0, 0.0, "")
        """When, what the thread had run by then, and in which phase it was."""

    def follow(self, thread: threading.Thread) -> None:
        """Look at this thread from now on."""
        self._place = f"/proc/self/task/{thread.native_id}"
        self._thread = thread

    def look(self, phase: str) -> None:
        """Count what was worked since the last look; ``phase`` is where the thread is now."""
        if self._thread is None:
            return
        try:
            with open(f"{self._place}/schedstat") as file:
                ran_ns, waited_ns, _ = file.read().split()
            ran_s, at = (int(ran_ns) + int(waited_ns)) / 1e9, now()
            asleep = self._asleep()
        except (OSError, ValueError):  # a kernel that does not count: nobody is told as slow
            return
        before_at, before_s, before = self._before
        self._before = (at, ran_s, phase)
        if phase not in COUNTED or before not in COUNTED:
            return
        ran_s -= before_s
        self.worked_s += ran_s
        if asleep and phase in MAY_SLEEP and not self._waits_for_peers():
            self.worked_s += max(0.0, at - before_at - ran_s)

    def _asleep(self) -> bool:
        with open(f"{self._place}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("S", "D")

    def _waits_for_peers(self) -> bool:
        assert self._thread is not None
        frame: FrameType | None = sys._current_frames().get(self._thread.ident or -1)
        while frame is not None and frame.f_code.co_filename.endswith(_DISPATCH):
            frame = frame.f_back
        return frame is not None and is_collective(frame.f_code.co_filename)
