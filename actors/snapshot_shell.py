"""Snapshots of a run, as the controller has them made: rounds, their commits in the journal, uploads, and what is
measured of them. When one is taken and what becomes of it is decided elsewhere: see ``run_lifecycle`` and ``cadence``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from actors.cadence import Cadence
from actors.chronicle import Chronicle
from actors.controller_spec import ControllerSpec
from actors.journal_writer import JournalWriter
from actors.members import Members
from actors.resume import give_up
from actors.rounds import RoundShell
from actors.uploads import Uploaded, UploadShell
from elastic.clock import now
from elastic.errors import ElasticError
from elastic.protocol import run_lifecycle as life
from elastic.protocol.run_lifecycle import RunState
from elastic.protocol.snapshot_round import COMMITTED, LIVE, RoundState
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot
from elastic.storage.blob_store import BlobStore
from policies.online import Written

log = logging.getLogger("elastic.snapshots")


class SnapshotShell:
    """``state`` gives the run as it is now, ``post`` takes events of its lifecycle, ``alarm`` what a person should see;
    ``collect`` brings in the metrics of rank 0."""

    def __init__(
        self,
        spec: ControllerSpec,
        store: BlobStore,
        *,
        state: Callable[[], RunState],
        post: Callable[[Any], None],
        alarm: Callable[[str], None],
        collect: Callable[[], Awaitable[None]],
        members: Members,
        chronicle: Chronicle,
        cadence: Cadence,
        journal: JournalWriter,
    ) -> None:
        self._run, self._store, self._synchronous = spec.run.name, store, spec.run.snapshots.synchronous
        self._state, self._post, self._alarm, self._collect = state, post, alarm, collect
        self._members, self._chronicle, self._cadence, self._journal = members, chronicle, cadence, journal
        self.rounds = RoundShell(self._round_ended, self.before_commit)
        self.uploads = UploadShell(
            lambda: members.stores,
            self._uploaded,
            self._upload_failed,
            self._metrics_of,
            spec.run.snapshots,
            spec.versions,
        )
        self._node_commits = 0
        self._journaled = (-1, 0)
        """Generation and step of the newest commit whose ledger is in the journal."""

    def start_round(self, command: life.StartRound) -> None:
        """Open the round that was decided, with the generation as it is now."""
        state = self._state()
        held = None
        if command.purpose == "entry":
            held = self._chronicle.entry_step
        elif command.purpose == "final":
            held = max(state.at_end.values())
        self.rounds.start(
            purpose=command.purpose,
            stop=command.stop,
            generation=state.generation,
            ranks={
                rank: self._members.ranks[name] for rank, name in enumerate(state.ranks) if name in self._members.ranks
            },
            nodes={rank: state.members[name].node for rank, name in enumerate(state.ranks)},
            stores=self._members.stores,
            peers=life.peers(state),
            share_bytes=self._members.share_bytes(state),
            held_step=held,
            committed_step=self._covered(state.generation),
            wanted_step=self._cadence.wanted_step if command.purpose == "periodic" else 0,
            step_s=self._chronicle.step_s,
            synchronous=self._synchronous,
        )

    def start_salvage(self, command: life.StartSalvage) -> None:
        """A round of what survivors kept: they are numbered among themselves, since the others are gone."""
        state = self._state()
        names = dict(enumerate(state.ranks[rank] for rank in command.ranks))
        kept = [state.departures[rank] for rank in command.ranks]
        share = max(d.live_bytes for d in kept) // len(kept) + max(d.live_slack_bytes for d in kept)
        self.rounds.start(
            purpose=LIVE,
            stop=False,
            generation=state.generation,
            ranks={place: self._members.ranks[name] for place, name in names.items() if name in self._members.ranks},
            nodes={place: state.members[name].node for place, name in names.items()},
            stores=self._members.stores,
            peers=life.peers(state),
            share_bytes=dict.fromkeys(names, share),
            held_step=command.step,
            committed_step=self._covered(state.generation),
            wanted_step=0,
            step_s=self._chronicle.step_s,
        )

    def _covered(self, generation: int) -> int:
        """Up to which step the journal has what the ranks of this generation consumed: they may forget it."""
        return self._journaled[1] if self._journaled[0] == generation else 0

    async def before_commit(self, state: RoundState) -> None:
        """The ledger of the steps up to this snapshot is in the journal before the snapshot is readable."""
        ledger = [row for rank in sorted(state.reports) for row in state.reports[rank].ledger]
        self._journal.note(
            "committed",
            attempt=state.attempt,
            step=state.step,
            purpose=state.purpose,
            generation=state.generation,
            places={str(rank): list(nodes) for rank, nodes in state.places.items()},
            ledger=ledger,
        )
        if await self._journal.flush():
            self._journaled = state.generation, state.step

    def _round_ended(self, state: RoundState) -> None:
        at = now()
        if state.phase != COMMITTED:
            log.warning("snapshot attempt %s (%s) was given up: %s", state.attempt, state.purpose, state.reason)
            self._journal.note("abandoned", attempt=state.attempt, purpose=state.purpose, reason=state.reason)
            self._chronicle.abandoned(state)
            self._post(
                life.RoundAbandoned(at, state.generation, state.purpose, state.reason, state.confirmed, state.refused)
            )
            return
        report = self._chronicle.committed(state, at - self.rounds.started_at, at)
        self._node_commits += 1
        every = self._cadence.remote_every
        # The live tier is taken in the middle of a recovery; the next round makes it durable.
        due = state.purpose in ("entry", "final", "stop", "notice", "leave") or (
            state.purpose != LIVE and self._node_commits % every == 0
        )
        uploading = self.uploads.committed(state, due=due or self._synchronous)
        if self._synchronous and not uploading:
            self.rounds.release(state.attempt, state.generation)
        self._cadence.captured(at, state.step, report.stall_s, uploading)
        self._journal.note("snapshot", **report.trace())
        self._journal.note("write", seconds=report.drain_s, tier="node")
        self._cadence.observe(Written(at, max(report.drain_s, 1e-6)))
        self._post(
            life.NodeCommitted(
                at,
                state.generation,
                NodeSnapshot(state.attempt, state.step, state.places, live=state.purpose == LIVE),
                state.purpose,
            )
        )

    def _uploaded(self, uploaded: Uploaded) -> None:
        ref, at = uploaded.ref, now()
        if uploaded.weights_only:
            self._journal.note(
                "weights",
                step=ref.step,
                directory=ref.directory,
                seconds=uploaded.seconds,
                written_bytes=uploaded.written_bytes,
            )
            return
        self._chronicle.durable(ref, uploaded.seconds, uploaded.parts_s, uploaded.written_bytes)
        self._journal.note(
            "durable",
            attempt=ref.attempt,
            step=ref.step,
            directory=ref.directory,
            seconds=uploaded.seconds,
            parts_s=dict(uploaded.parts_s),
            written_bytes=uploaded.written_bytes,
            referenced_bytes=uploaded.referenced_bytes,
        )
        self._journal.note("write", seconds=uploaded.seconds, tier="remote")
        self._cadence.observe(Written(at, uploaded.seconds, "remote"))
        self._waited_for(ref.attempt)
        self._post(life.RemoteCommitted(at, RemoteSnapshot(ref.attempt, ref.step)))

    async def _metrics_of(self, step: int) -> Mapping[str, float]:
        """What was reported in the step that ends at boundary ``step``; it may not have been collected yet."""
        if step > self._chronicle.step:
            await self._collect()
        return self._chronicle.metrics_of(step)

    def _waited_for(self, attempt: str) -> None:
        """Ranks that wait for a synchronous snapshot go on: it is durable, or it will not be and that was told."""
        if self._synchronous:
            self.rounds.release(attempt, self._state().generation)

    def _upload_failed(self, attempt: str, reason: str) -> None:
        self._waited_for(attempt)
        self._alarm(reason)

    async def quarantine(self, command: life.Quarantine) -> None:
        """The decision is told first: a run that ends with it does not wait for the note to be written."""
        step = command.snapshot.step
        self._alarm(
            f"the snapshot of step {step} failed to restore and is in quarantine until 'elastic snapshots verify "
            f"{step} --deep' finds it whole: {command.reason}"
        )
        self.uploads.distrust()
        arguments = (self._store, self._run, command.snapshot.attempt, command.reason)
        try:
            await asyncio.get_running_loop().run_in_executor(None, give_up, *arguments)
        except ElasticError as error:
            self._alarm(f"the quarantine of step {step} could not be noted in storage: {error}")

    async def make_durable(self) -> None:
        """Upload the newest snapshot of the node tier, and tell when nothing is in flight any more."""
        self._post(life.UploadsIdle(now(), await self.uploads.finish()))
