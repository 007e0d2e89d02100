"""Brings node snapshots to durable storage: one at a time, and training never waits for one.

A slot that comes while an upload is in flight is skipped. At the end of a run the newest snapshot is made durable
whatever was skipped before.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from actors.calls import answer, first_line
from actors.node_store import Upload
from elastic.clock import now, wall
from elastic.config import SnapshotConfig
from elastic.errors import CommitUnknown, ElasticError, SnapshotError
from elastic.protocol.snapshot_round import LIVE, RoundState
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.object_names import new_snapshot_id, snapshot_directory

log = logging.getLogger("elastic.uploads")

FINAL_TRIES = 3


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A durable commit. ``seconds`` from the order to the marker, ``parts_s`` of it for packs and for the commit;
    bytes that were written anew, and that older snapshots held."""

    ref: SnapshotRef
    seconds: float
    parts_s: Mapping[str, float]
    written_bytes: int
    referenced_bytes: int
    weights_only: bool = False


class UploadShell:
    """``on_commit`` gets every durable commit, ``on_failure`` the reason of every upload that failed; ``metrics_of``
    answers what the run reported in a step."""

    def __init__(
        self,
        stores: Callable[[], Mapping[str, Any]],
        on_commit: Callable[[Uploaded], None],
        on_failure: Callable[[str, str], None],
        metrics_of: Callable[[int], Awaitable[Mapping[str, float]]],
        config: SnapshotConfig,
        versions: Mapping[str, str],
    ) -> None:
        self._stores, self._on_commit, self._on_failure, self._config = stores, on_commit, on_failure, config
        self._versions = versions
        self._metrics_of = metrics_of
        self._tasks: set[asyncio.Task[bool]] = set()
        self._newest: RoundState | None = None
        self._begun_step = self._done_step = -1
        self.previous: SnapshotRef | None = None
        self._node_commits = 0
        self._weights: asyncio.Task[None] | None = None
        self._previous_weights: SnapshotRef | None = None
        self._directories: list[str] = []
        """Of snapshots that are being written, and of those that they refer to."""
        self.last_failure = ""

    @property
    def in_flight(self) -> bool:
        """Whether an upload is running."""
        return bool(self._tasks)

    @property
    def busy(self) -> bool:
        """Whether as many uploads are running as may be."""
        return len(self._tasks) >= self._config.max_uploads_in_flight

    @property
    def blocks(self) -> bool:
        """Whether no snapshot should be taken until an upload has arrived."""
        return self.busy and self._config.when_busy == "block"

    def committed(self, state: RoundState, *, due: bool) -> bool:
        """A node snapshot was committed; upload it if it is due and there is room. True if it was begun."""
        self._newest = state
        self._weights_too(state)
        if not due or self.busy:
            return False
        self._begin(state)
        return True

    def _weights_too(self, state: RoundState) -> None:
        """Send the weights alone if they are due; a slot that comes while they are on their way is skipped."""
        self._node_commits += state.purpose != LIVE
        every = self._config.weights_every
        if every is None or state.purpose == LIVE or self._node_commits % every or self._weights is not None:
            return
        self._weights = asyncio.get_running_loop().create_task(self._upload_weights(state))

    async def _upload_weights(self, state: RoundState) -> None:
        try:
            uploaded = await self._perform(state, now(), weights_only=True)
        except (ElasticError, RayError, KeyError, OSError) as error:
            self._on_failure("", f"the weights of step {state.step} did not become durable: {first_line(error)}")
        else:
            self._previous_weights = uploaded.ref
            self._on_commit(uploaded)
        finally:
            self._weights = None

    def adopt(self, newest: RoundState, durable: bool) -> None:
        """A predecessor's newest snapshot; one that is not durable is uploaded now, whatever became of its upload."""
        self._newest = newest
        if durable:
            self._begun_step = self._done_step = newest.step
        else:
            self._begin(newest)

    def _begin(self, state: RoundState) -> None:
        self._begun_step = max(self._begun_step, state.step)
        task = asyncio.get_running_loop().create_task(self._upload(state))
        self._tasks.add(task)
        task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[bool]) -> None:
        self._tasks.discard(task)
        newest = self._newest
        if self._config.when_busy == "coalesce" and newest is not None and newest.step > self._begun_step:
            self._begin(newest)

    def distrust(self) -> None:
        """What was uploaded turned out to be damaged: the next snapshot refers to none of it."""
        self.previous = self._previous_weights = None

    async def finish(self) -> str:
        """Make the newest node snapshot durable. Returns why not, or an empty text."""
        if self._weights is not None:
            await asyncio.wait({self._weights})
        for attempt in range(FINAL_TRIES + 1):
            while self._tasks:
                await asyncio.wait(set(self._tasks))
            if self._newest is None or self._done_step >= self._newest.step:
                return ""
            if attempt < FINAL_TRIES:
                self._begin(self._newest)
        return self.last_failure

    async def _upload(self, state: RoundState) -> bool:
        started = now()
        try:
            uploaded = await self._perform(state, started)
        except (ElasticError, RayError, KeyError, OSError) as error:
            self.last_failure = f"step {state.step} did not become durable: {first_line(error)}"
            log.warning("%s; training goes on", self.last_failure)
            self._on_failure(state.attempt, self.last_failure)
            return False
        if state.step > self._done_step:
            self._done_step, self.previous = state.step, uploaded.ref
        self._on_commit(uploaded)
        return True

    async def _perform(self, state: RoundState, started: float, weights_only: bool = False) -> Uploaded:
        stores = self._stores()
        owners = {rank: next((n for n in nodes if n in stores), "") for rank, nodes in state.places.items()}
        if lost := [rank for rank, node in owners.items() if not node]:
            raise SnapshotError(f"the shares of ranks {lost} are in no node's memory any more", state.attempt)
        snapshot_id = new_snapshot_id(wall(), secrets.token_hex(4))
        previous = self._previous_weights if weights_only else self.previous
        upload = Upload(
            state.attempt,
            snapshot_id,
            state.step,
            secrets.token_hex(16),
            self._versions,
            None if self._config.synchronous else previous,
            weights_only,
        )
        using = [snapshot_directory(state.step, upload.snapshot_id)]
        using += [upload.previous.directory] if upload.previous else []
        self._directories += using
        try:
            uploaded, leader = await self._write(state, upload, owners, stores, started)
        finally:
            for directory in using:
                self._directories.remove(directory)
        keep = self._config.keep_weights if weights_only else self._config.keep
        try:
            await answer(leader.retain.remote(uploaded.ref.run, keep, tuple(self._directories)))
        except (ElasticError, RayError) as error:
            log.warning("old snapshots were not removed: %s", first_line(error))
        return uploaded

    async def _write(
        self, state: RoundState, upload: Upload, owners: Mapping[int, str], stores: Mapping[str, Any], started: float
    ) -> tuple[Uploaded, Any]:
        """Packs and tables by the stores that hold them, then manifest and marker by one of them."""
        by_node: dict[str, list[int]] = {}
        for rank, node in owners.items():
            by_node.setdefault(node, []).append(rank)
        files = await asyncio.gather(
            *(
                answer(stores[node].upload.remote(upload, tuple(ranks), number))
                for number, (node, ranks) in enumerate(sorted(by_node.items()))
            )
        )
        packed = now()
        leader = stores[owners[min(owners)]]
        reports = tuple(state.reports[rank] for rank in sorted(state.reports))
        records = tuple(record for part in files for record in part)
        arguments = (upload, owners, reports, records, dict(await self._metrics_of(state.step)))
        try:
            ref: SnapshotRef = await answer(leader.commit_durable.remote(*arguments))
        except CommitUnknown:
            ref = await answer(leader.commit_durable.remote(*arguments))
        ended = now()
        return Uploaded(
            ref,
            ended - started,
            {"upload": packed - started, "commit": ended - packed},
            sum(record.written_bytes for record in records),
            sum(record.referenced_bytes for record in records),
            upload.weights_only,
        ), leader
