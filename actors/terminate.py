"""SIGTERM to a process of a run: word that it has to go, not its end.

Ray's own handler ends a worker at once, and with it everything that was not saved. Here the first signal is news for
the controller, which moves the ranks away at a boundary and then ends the process; a second signal ends it at once.
For an actor that Ray starts again, and that can be killed at any moment, the way out is to be killed: told to end by
Ray's handler it would wait for calls that do not return, and answer nobody meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

EXIT_TERMINATED = 128 + signal.SIGTERM


def on_sigterm(tell: Callable[[], None]) -> None:
    """Call ``tell`` at the first SIGTERM of this process, on a thread of its own. From an actor's constructor: only
    the main thread may set a handler, and Ray runs that there."""
    told = threading.Event()

    def handle(*_: object) -> None:
        if told.is_set():
            os._exit(EXIT_TERMINATED)
        told.set()
        # Not from here: what the main thread was doing may hold a lock that telling needs.
        threading.Thread(target=tell, name="sigterm", daemon=True).start()

    signal.signal(signal.SIGTERM, handle)


def die_of_sigterm() -> None:
    """End at once, as if killed, at SIGTERM. From any thread: Ray constructs actors with coroutines on one of theirs,
    where Python sets no handlers."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGTERM, int(signal.SIG_DFL))
