"""Looks at the run and the cluster from time to time: nodes that come and go, metrics, and whether a snapshot is due.

The only timers of the controller beside its deadlines. What is seen becomes events and measurements; it decides
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError

from actors.cadence import Cadence
from actors.calls import answer
from actors.chronicle import Chronicle
from actors.cluster_view import cluster_view, draining_nodes
from actors.journal_writer import JournalWriter
from actors.members import Members
from actors.notices import NoticeShell
from actors.rounds import RoundShell
from actors.uploads import UploadShell
from elastic.clock import now
from elastic.protocol import run_lifecycle as life
from elastic.protocol.last_rows import LastRows, rows_owed
from elastic.protocol.run_lifecycle import RunState
from elastic.step_metrics import Row
from policies.online import Running

VIEW_EVERY_S = 0.25
MEASURE_EVERY_S = 0.25
METRICS_TIMEOUT_S = 5.0
LAST_ROWS_TIMEOUT_S = 2.0
"""How long the next generation waits for rows of the last one; a rank that lives tells them within milliseconds."""


class Observer:
    """``state`` gives the run as it is now, ``post`` takes events of its lifecycle."""

    def __init__(
        self,
        *,
        state: Callable[[], RunState],
        post: Callable[[Any], None],
        resources: Mapping[str, float],
        members: Members,
        rounds: RoundShell,
        uploads: UploadShell,
        chronicle: Chronicle,
        cadence: Cadence,
        journal: JournalWriter,
        notices: NoticeShell,
    ) -> None:
        self._state, self._post, self._resources = state, post, dict(resources)
        self._members, self._rounds, self._uploads = members, rounds, uploads
        self._chronicle, self._cadence, self._journal = chronicle, cadence, journal
        self._notices = notices
        self._seen: dict[str, tuple[int, str]] | None = None
        self._measured_at = 0.0
        self._was_uploading = False
        self.noted = (-1, -1)
        """Generation and step of the last row that went into the journal's hands."""

    async def watch_nodes(self) -> None:
        """Tell the lifecycle when the set of nodes changes."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(RayError, ConnectionError):
                drains = await loop.run_in_executor(None, draining_nodes)
                view = await loop.run_in_executor(None, cluster_view, self._resources, drains)
                self._members.raylets = view.raylets
                if (seen := view.nodes) != self._seen:
                    self._seen = seen
                    self._post(life.ClusterSeen(now(), seen))
                self._notices.drains({node: until for node, until in drains.items() if node in seen})
            await asyncio.sleep(VIEW_EVERY_S)

    async def measure(self) -> None:
        """Collect rank 0's metrics, and open a round when one is due."""
        while True:
            await asyncio.sleep(self._until_due())
            state, at = self._state(), now()
            if state.phase != life.RUNNING:
                continue
            if at - self._measured_at >= MEASURE_EVERY_S:
                elapsed, self._measured_at = at - self._measured_at, at
                await self.collect(min(elapsed, 10 * MEASURE_EVERY_S))
            state = self._state()
            free = not (state.round_open or state.at_end or self._rounds.open or self._uploads.blocks)
            if free and self._due_in() <= 0:
                self._post(life.SnapshotDue(now()))

    def _due_in(self) -> float:
        return self._cadence.due_in(now(), self._chronicle.step, self._chronicle.step_s)

    def _until_due(self) -> float:
        if self._state().phase != life.RUNNING:
            return MEASURE_EVERY_S
        return min(MEASURE_EVERY_S, max(0.02, self._due_in()))

    def _heard(self, rank: int, generation: int, samples: int, rows: Sequence[Row]) -> list[Row]:
        """Take rows of finished steps into chronicle and journal; returns those that were not heard before."""
        new = [row for row in rows if (generation, row[0]) > self.noted]
        if new:
            self.noted = generation, new[-1][0]
            self._chronicle.measured(generation, samples, new, now(), rank)
            self._journal.note("metrics", generation=generation, rank=rank, rows=new)
        return new

    async def complete(self, before: RunState, after: RunState) -> None:
        """If a generation ended between the two, ask for the rows of its steps that count and were not heard."""
        if owed := rows_owed(before, after, self.noted):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ask(owed), LAST_ROWS_TIMEOUT_S)

    async def _ask(self, owed: LastRows) -> None:
        for rank, member in owed.ranks:
            if member not in self._members.ranks:
                continue
            heard = max(self.noted, (owed.generation, owed.after))
            with contextlib.suppress(RayError):
                generation, samples, rows = await answer(self._members.ranks[member].metrics_after.remote(heard))
                self._heard(rank, generation, samples, [row for row in rows if row[0] <= owed.step])
            if self.noted >= (owed.generation, owed.step):
                return

    async def collect(self, elapsed_s: float = 0.0) -> None:
        """Rows of finished steps from rank 0, and ``elapsed_s`` more of exposure to failures."""
        state = self._state()
        actor = self._members.ranks.get(state.ranks[0]) if state.ranks else None
        if actor is None:
            return
        uploading = self._uploads.in_flight
        with contextlib.suppress(RayError, asyncio.TimeoutError):
            taken = await asyncio.wait_for(answer(actor.metrics_after.remote(self.noted)), METRICS_TIMEOUT_S)
            # What counts of a generation that is over was asked for when it ended.
            rows = self._heard(0, *taken) if taken[0] == self._state().generation else []
            # Only a window that lay wholly within an upload, or outside of any, says what uploads cost.
            if rows and self._was_uploading == uploading == self._uploads.in_flight:
                seconds = sum(seconds for _, seconds, _ in rows)
                self._cadence.stepped(now(), seconds, len(rows), uploading=uploading)
        self._was_uploading = uploading
        nodes = {state.members[name].node for name in state.ranks if name in state.members}
        node_s = elapsed_s * len(nodes)
        self._journal.note("exposure", node_s=round(node_s, 3), nodes=len(nodes))
        self._cadence.observe(Running(now(), node_s, self._chronicle.step_s or None))
