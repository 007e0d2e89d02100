"""The only place that reads a clock. Everything below the actors takes times as arguments.

``now`` is comparable between processes of one host and across a reboot is not needed: it is CLOCK_MONOTONIC on Linux,
which all processes of a host share. ``wall`` is for people and file names only; it never decides anything.
"""

from __future__ import annotations

import time


def now() -> float:
    """Seconds on the monotonic clock of this host."""
    return time.monotonic()


def wall() -> float:
    """Seconds since 1970, for people."""
    return time.time()
