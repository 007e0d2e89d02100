"""Where word comes from that a node goes away: Ray's drains, SIGTERM to one of our processes, a user.

Turns it into events of the lifecycle, with what a stop at a boundary takes now; decides nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from elastic.clock import now, wall
from elastic.protocol import run_lifecycle as life
from elastic.protocol.membership import Evacuation
from elastic.protocol.notices import told

log = logging.getLogger("elastic.notices")


class NoticeShell:
    """``needs`` gives the seconds to a committed boundary and those of an upload, ``note(kind, **fields)`` journals."""

    def __init__(
        self,
        post: Callable[[Any], None],
        needs: Callable[[], tuple[float, float]],
        note: Callable[..., None],
        notice_s: float,
    ) -> None:
        self._post, self._needs, self._note, self._notice_s = post, needs, note, notice_s
        self._drains: dict[str, float] = {}

    def drains(self, seen: Mapping[str, float]) -> None:
        """The nodes that Ray drains now, with the moment (seconds since 1970, 0 for none) at which each may go."""
        for node in self._drains.keys() - seen.keys():
            self._note("notice", node=node, by="drain", over=True)
            self._post(life.NodeStaying(now(), node, "drain"))
        for node, until in seen.items():
            if self._drains.get(node) != until:
                self._leaving(node, "drain", "Ray drains it", until - wall() if until else math.inf)
        self._drains = dict(seen)

    def sigterm(self, node: str, member: str) -> None:
        """A process of the run on ``node`` was told to end; ``member`` if it is a rank."""
        self._leaving(node, "sigterm", f"SIGTERM to {member or 'its store'}", self._notice_s, member)

    def exclude(self, node: str, left_s: float | None) -> None:
        """A user does not want the node, from now on or in ``left_s`` seconds at the latest."""
        self._leaving(node, "exclude", "a user excluded it", math.inf if left_s is None else left_s)

    def slow(self, node: str, why: str) -> None:
        """A rank is slow on the node: it is left at a boundary, for a while."""
        self._leaving(node, "straggler", why, math.inf)

    def readmit(self, node: str) -> None:
        """A user wants the node again, whatever a user or a signal said before; a drain is Ray's to end."""
        self._note("notice", node=node, by="exclude", over=True)
        for by in ("exclude", "sigterm", "straggler"):
            self._post(life.NodeStaying(now(), node, by))

    def _leaving(self, node: str, by: str, why: str, left_s: float, member: str = "") -> None:
        boundary_s, upload_s = self._needs()
        until = f"in {left_s:.1f} s" if math.isfinite(left_s) else "at no time that is known"
        log.warning("node %s goes away %s: %s; a boundary takes %.1f s", node[:12], until, why, boundary_s)
        self._note("notice", node=node, by=by, why=why, left_s=left_s if math.isfinite(left_s) else None)
        self._post(life.NodeLeaving(now(), node, by, why, now() + left_s, boundary_s, upload_s, member))

    def closed(self, evacuation: Evacuation) -> dict[str, Any]:
        """What notices led to, for the status, the result and the journal."""
        story = told(evacuation)
        self._note("evacuation", **story)
        log.info("notices are over: %s", story)
        return story
