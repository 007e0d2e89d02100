"""Which nodes are left alone for a while: those that fail again and again, and not those that chance has struck.

A node is left alone when it failed twice with no other node's failure in between, or when within the window at least
three and more than half of all failures were its own. Each time it is left alone twice as long as the last time.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["FIRST_S", "MOST_S", "WINDOW_S", "cooldown_s"]

WINDOW_S = 3600.0
FIRST_S = 60.0
MOST_S = 3600.0


def cooldown_s(failures: Sequence[tuple[float, str]], node: str, times_before: int) -> tuple[float, str]:
    """(seconds that ``node``, which just failed, is left alone; why). 0 where it is not. ``failures``: (time, node) of
    all, oldest first, the one that just came last; ``times_before``: how often it was left alone already."""
    if not failures:
        return 0.0, "it never failed"
    last = failures[-1][0]
    recent = [where for at, where in failures if at > last - WINDOW_S]
    own = recent.count(node)
    twice = recent[-2:] == [node, node]
    if not twice and not (own >= 3 and own * 2 > len(recent)):
        return 0.0, f"{own} of the last {len(recent)} failures were its own"
    seconds = min(MOST_S, FIRST_S * 2.0 ** min(30, times_before))
    why = "it failed twice in a row" if twice else f"{own} of the last {len(recent)} failures were its own"
    return seconds, f"{why}; left alone for {seconds:g} s"
