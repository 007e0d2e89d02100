"""A store's eye on its node: what its ranks do, and whether the controller still asks.

The controller asks every store once a second. The answer tells it that the node lives; the question tells the node that
it still belongs to the run. Where no question has come for ``fence_timeout_s`` the node has been given up, or soon will
be: its ranks are killed and its memory is given back before anybody can come back and write.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from actors.progress_page import BEAT_S, PREFIX, Page, read_pages
from actors.stack_dump import dump
from elastic.clock import now
from elastic.protocol.hangs import STANDING, NodePulse, RankPulse
from elastic.protocol.stragglers import RankWork

log = logging.getLogger("elastic.store")

OWN = "store"
"""The member name under which a store keeps a page of its own, so that its successor can end it."""
SILENT_S = 3.0
"""A stopped process that has been silent for so long is named to the controller, which decides."""
GONE_S = 2.0


@dataclass(frozen=True, slots=True)
class Stacks:
    """One rank's stacks, and the seconds that its process has run."""

    member: str
    text: str
    cpu_s: float


class NodeWatch:
    """``directory`` holds the pages. ``fence`` is called, once, when the controller has not asked for too long."""

    def __init__(self, node: str, address: str, directory: str, fence_timeout_s: float, fence: Callable[[], None]):
        self._node, self._address, self._directory = node, address, directory
        self._timeout_s, self._fence = fence_timeout_s, fence
        self._asked_at = now()
        threading.Thread(target=self._watch, name="fence", daemon=True).start()

    def pulse(self, generation: int, members: Collection[str]) -> NodePulse:
        """The ranks of ``generation`` on this node, which are ``members``, in short. Being asked is what keeps the node
        in the run."""
        self._asked_at = now()
        at = now()
        over: list[RankPulse] = []
        moving: list[int] = []
        work: list[RankWork] = []
        for page in self._pages():
            if page.member not in members:
                continue
            work.append(RankWork(page.member, page.generation, page.step, page.worked_s, page.alive_at))
            rank = _pulse(page, at)
            if rank.stopped and rank.silent_s > SILENT_S:
                over.append(rank)
            elif page.generation < generation:
                moving.append(-1)  # it is about to begin
            elif rank.over:
                over.append(rank)
            elif rank.phase not in STANDING:
                moving.append(rank.step)
        return NodePulse(self._node, self._address, tuple(over), min(moving, default=None), tuple(work))

    def stacks(self, members: Collection[str]) -> list[Stacks]:
        """The stacks of those of ``members`` that are here, by py-spy; an empty text where they cannot be had."""
        pages = [page for page in self._pages() if page.member in members]
        return [Stacks(page.member, dump(page.pid), page.cpu_s) for page in pages]

    def end(self, member: str) -> bool:
        """SIGKILL the rank's process; False if it is gone. A process that hangs does not heed a request to end."""
        return any(page.kill() for page in self._pages() if page.member == member)

    def _pages(self) -> list[Page]:
        return [page for page in read_pages(self._directory) if page.member != OWN and page.state not in ("", "Z")]

    def _watch(self) -> None:
        """Sleeps of this thread that take too long, because the machine had no time for it, count as their length."""
        silent_s, seen = 0.0, self._asked_at
        while True:
            time.sleep(BEAT_S)
            silent_s, seen = (silent_s + BEAT_S, seen) if seen == self._asked_at else (0.0, self._asked_at)
            if silent_s >= self._timeout_s:
                log.error("the controller has not asked for %g s: this node leaves the run", silent_s)
                end_processes(self._directory, spare=os.getpid())
                self._fence()
                return


def _pulse(page: Page, at: float) -> RankPulse:
    return RankPulse(
        page.member,
        page.phase,
        page.step,
        at - page.marked_at,
        page.limit_s,
        at - page.alive_at,
        stopped=page.state == "T",
    )


def end_processes(directory: str, spare: int = -1, patience_s: float = 0.0) -> list[str]:
    """SIGKILL every process that has a page in ``directory``, wait until they are gone, and remove the pages. Returns
    the members that were still there. ``patience_s``: those that were told to end have so long to do it, since Ray
    prints a warning for each process that ends otherwise."""
    pages = [page for page in read_pages(directory) if page.pid != spare]
    end = now() + patience_s
    while now() < end and any(page.state not in ("", "Z") for page in pages):
        time.sleep(0.01)
    ended = [page.member for page in pages if page.kill()]
    end = now() + GONE_S
    while now() < end and any(page.state not in ("", "Z") for page in pages):
        time.sleep(0.01)
    for page in pages:
        with suppress(OSError):
            os.unlink(os.path.join(directory, PREFIX + page.member))
    return ended
