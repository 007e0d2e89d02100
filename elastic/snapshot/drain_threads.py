"""Threads that work beside training and must not be felt by it."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

DRAIN_NICE = 10
"""Of a core that a train thread wants too such a thread gets a tenth; of one that is free, all."""


def drain_threads(count: int, name: str, nice: int = 0) -> ThreadPoolExecutor:
    """A pool whose threads are ``nice`` more nice than this process, where the system has that for single threads."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_step_back, initargs=(nice,))


def _step_back(nice: int) -> None:
    if nice and sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + nice))
