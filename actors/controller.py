"""The controller of a run: a detached, named actor around the pure machines of ``elastic.protocol``.

    events (ranks, stores, cluster, users, timers) ─▶ queue ─▶ RunLifecycle ─▶ journal ─▶ commands performed

One event at a time. A decision is in the journal before it is acted on; everything slow runs beside the loop and comes
back as an event. Nothing here decides who trains, from what or when: see ``run_lifecycle``, ``snapshot_round`` and
``policies``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import asdict, replace
from typing import Any

import ray

from actors import succession
from actors.adoption import end_all_of
from actors.autoscaler import AutoscalerShell
from actors.cadence import Cadence
from actors.chronicle import Chronicle
from actors.controller_spec import ControllerSpec
from actors.generation_shell import GenerationShell
from actors.heartbeats import Heartbeats
from actors.inbox import Inbox
from actors.journal_writer import JournalWriter
from actors.members import Members
from actors.node_store import StoreEvent
from actors.notices import NoticeShell
from actors.observer import Observer
from actors.rank_orders import RankEvent, departure_of
from actors.resume import start_of, what_is_durable
from actors.snapshot_shell import SnapshotShell
from actors.straggler_watch import StragglerWatch
from actors.terminate import die_of_sigterm
from elastic.clock import now, wall
from elastic.errors import ElasticError, InternalError
from elastic.journal import plain_error
from elastic.protocol import run_lifecycle as life
from elastic.protocol.classification import COUNTED, PREEMPTION
from elastic.protocol.machine import Machine
from elastic.protocol.membership import smallest
from elastic.protocol.run_lifecycle import RunState
from elastic.protocol.run_record import record_of
from elastic.result import Result
from elastic.storage.blob_store import open_store
from policies.online import Failed, Restored

log = logging.getLogger("elastic.controller")

FLUSH_EVERY_S = 15.0
REMEMBER_TIMEOUT_S = 60.0
LINGER_S = 120.0
"""How long the controller of a run that ended waits to be asked for the result, before it ends itself."""


class Controller:
    """The actor. ``start`` returns when the run is under way or has failed to begin; ``result`` when it has ended."""

    def __init__(self, spec: ControllerSpec) -> None:
        die_of_sigterm()
        self.spec = spec
        self.name = spec.run.name
        self.store = open_store(spec.run.storage_path)
        self.journal = JournalWriter(
            self.store,
            self.name,
            f"c{int(wall())}-{secrets.token_hex(3)}",
            lambda: record_of(self.machine.state),
        )
        self.machine: Machine[RunState] = Machine(
            "run", life.TABLE, RunState(spec.limits, target=spec.scaling.max_workers)
        )
        self.chronicle = Chronicle(self.name, spec.run.storage_path)
        self.heartbeats = Heartbeats(
            self.name,
            spec.run.failures,
            state=lambda: self.machine.state,
            post=self.post,
            note=self.journal.note,
            blobs=self.store,
            stores=lambda: self.members.stores,
            own_stacks=lambda member: self.members.stacks_of(member),
        )
        self.members = Members(
            spec, self.post, self.rank_said, self.store_said, self.heartbeats, lambda: self.journal.metrics_written
        )
        self.cadence = Cadence(spec.run.snapshots, spec.scaling.min_workers, now(), self.journal.note)
        self.generations = GenerationShell(
            spec,
            state=lambda: self.machine.state,
            spawn=self._spawn,
            members=self.members,
            chronicle=self.chronicle,
            cadence=self.cadence,
        )
        self.snapshots = SnapshotShell(
            spec,
            self.store,
            state=lambda: self.machine.state,
            post=self.post,
            alarm=self._alarm,
            collect=lambda: self.observer.collect(),
            members=self.members,
            chronicle=self.chronicle,
            cadence=self.cadence,
            journal=self.journal,
        )
        self.notices = NoticeShell(
            self.post, self.chronicle.boundary_takes_s, self.journal.note, spec.run.failures.notice_s
        )
        self.stragglers = StragglerWatch(
            spec.run.failures,
            state=lambda: self.machine.state,
            readings=self.heartbeats.work,
            chronicle=self.chronicle,
            note=self.journal.note,
            alarm=self._alarm,
            notices=self.notices,
        )
        self.autoscaler = AutoscalerShell(
            self.name, spec.scaling.resources, lambda: self.machine.state, self.journal.note
        )
        self.observer = Observer(
            state=lambda: self.machine.state,
            post=self.post,
            resources=spec.scaling.resources,
            members=self.members,
            rounds=self.snapshots.rounds,
            uploads=self.snapshots.uploads,
            chronicle=self.chronicle,
            cadence=self.cadence,
            journal=self.journal,
            notices=self.notices,
        )
        self._inbox = Inbox()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._heard: dict[int, asyncio.Future[None]] = {}
        """By the id of what a user asked: done when it is decided and written."""
        self._remembered: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._begun = False
        context = ray.get_runtime_context()
        self._successor = bool(context.was_current_actor_reconstructed)
        if self._successor:
            context.current_actor.start.remote()  # nobody else may be there to say it

    # --- calls of the driver and of commands ---------------------------------------------------------------------

    async def start(self) -> None:
        """Begin, or go on where the controller before this one was lost. A failure is the run's result."""
        if self._begun:
            await self._ready.wait()
            return
        self._begun = True
        try:
            if self._successor:
                await self._guard(succession.take_over(self))
            else:
                await self._start()
        finally:
            self._ready.set()

    async def _start(self) -> None:
        """Check the storage, find what is durable, and begin."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(None, what_is_durable, self.store, self.name)
            snapshots = found.snapshots
            if not snapshots and (start := self.spec.run.start_from):
                mode = self.spec.run.restore.mode
                snapshots = (await loop.run_in_executor(None, start_of, start, mode, self.store, self.name),)
        except ElasticError as error:
            self._finish(life.EndRun("failed", str(error), kind="refused"), error)
            return
        state = self.machine.state
        self.machine.state = life.resumed(state, found.generation, snapshots)
        for text in found.skipped:
            self._alarm(text)
        await loop.run_in_executor(None, end_all_of, self.name)  # left by a controller that is gone for good
        await self.take_office(found.generation, found.epoch + 1, "started")
        await self.generations.make_rendezvous()
        self.go_on()

    async def take_office(self, generation: int, epoch: int, kind: str) -> None:
        """Claim the number of this controller in the journal, before anybody is told anything."""
        self.journal.generation, self.journal.epoch, self.members.epoch = generation, epoch, epoch
        self.journal.note(kind, epoch=epoch)
        await self.journal.flush()

    def go_on(self) -> None:
        """Look, listen and decide from now on."""
        watching = (
            self.observer.watch_nodes(),
            self.observer.measure(),
            self.heartbeats.judge(),
            self.stragglers.judge(),
            self.autoscaler.follow(),
        )
        for work in (self._main(), *watching, self._flush()):
            self._tasks.append(asyncio.get_running_loop().create_task(self._guard(work)))

    async def result(self) -> Result:
        """The result, when the run has ended."""
        await self._ended.wait()
        assert self.chronicle.result is not None
        return self.chronicle.result

    async def status(self) -> dict[str, Any]:
        """What a person wants to know of the run now; JSON-able."""
        await self._ready.wait()
        return self.chronicle.status(
            self.machine.state, self.cadence, self.snapshots.uploads.in_flight, self.journal.lag, now()
        )

    async def decisions(self, after: float) -> list[tuple[float, str]]:
        """What was decided after that moment (seconds since 1970), in sentences, as far back as it is remembered."""
        return [(t, text) for t, text in self.journal.told if t > after]

    async def resize(self, workers: int) -> int:
        """Want so many ranks from now on, within the run's limits; returns what is wanted now."""
        limits = self.machine.state.limits
        await self._ask(life.ResizeAsked(now(), workers))
        wanted = max(limits.min_workers, min(limits.max_workers, workers))
        return max(wanted, smallest(limits.mesh, limits.min_workers, limits.max_workers))

    async def stop(self) -> None:
        """End the run at the next boundary, with a durable snapshot."""
        await self._ask(life.StopAsked(now()))

    async def _ask(self, event: Any) -> None:
        """Post ``event`` and wait until it is in the journal: who was answered need not ask again."""
        await self._ready.wait()
        if self._ended.is_set():
            return
        self._heard[id(event)] = heard = asyncio.get_running_loop().create_future()
        self.post(event)
        await heard

    def exclude(self, node: str, left_s: float | None = None) -> None:
        """Move off this node at a boundary, and do not use it again; within ``left_s`` seconds, where it goes then."""
        self.notices.exclude(node, left_s)

    def readmit(self, node: str) -> None:
        """Use the node again."""
        self.notices.readmit(node)

    # --- the loop ------------------------------------------------------------------------------------------------

    def post(self, event: Any) -> None:
        """Queue an event of the run's lifecycle."""
        if isinstance(event, life.MemberLost):
            event = replace(event, step=self.chronicle.step)  # what is known of how far it had come
        self._inbox.put(event)

    async def _guard(self, work: Any) -> None:
        """A fault of ours ends the run with its story instead of leaving it to hang."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("the controller failed")
            story = (
                error
                if isinstance(error, InternalError)
                else InternalError(f"{type(error).__name__}: {error}", self.machine.story)
            )
            self._finish(life.EndRun("failed", str(story), kind="internal"), story)

    async def _main(self) -> None:
        while not self._ended.is_set():
            event = await self._inbox.next(self.machine.state.deadline)
            before = self.machine.state
            commands = self.machine.handle(event)
            if isinstance(event, life.NodeCommitted):
                # What the steps of a snapshot reported must not be lost with the ranks that come back to it.
                self._spawn(self.observer.collect())
            await self.observer.complete(before, self.machine.state)
            if decisions := self.chronicle.decisions(event, before, self.machine.state, commands, self.journal):
                self.journal.generation = self.machine.state.generation
                await self.journal.flush()
                log.info("decided: %s", decisions)
            if (heard := self._heard.pop(id(event), None)) is not None and not heard.done():
                heard.set_result(None)
            for command in commands:
                await self.perform(command)

    async def perform(self, command: Any) -> None:
        """Carry out one command of the run's lifecycle."""
        if isinstance(command, life.StartStore):
            self.members.start_store(command.node)
        elif isinstance(command, life.StartMember):
            self.members.start_member(command.member, command.node)
        elif isinstance(command, life.KillMember):
            self.members.kill(command.member)
        elif isinstance(command, life.BeginGeneration):
            await self.generations.begin(command)
        elif isinstance(command, life.Interrupt):
            self.members.interrupt(command.members, command.generation)
        elif isinstance(command, life.Probe):
            self.members.probe(command.members)
        elif isinstance(command, life.StartRound):
            self.snapshots.start_round(command)
        elif isinstance(command, life.StartSalvage):
            self.snapshots.start_salvage(command)
        elif isinstance(command, life.CancelRound):
            self.snapshots.rounds.cancel(command.reason)
        elif isinstance(command, life.EndRoundBeyond):
            self.snapshots.rounds.end_reached(command.step)
        elif isinstance(command, life.CloseIncident):
            self._incident_over(command.incident)
        elif isinstance(command, life.CloseNotice):
            self.chronicle.notice_over(self.notices.closed(command.evacuation))
        elif isinstance(command, life.Warn):
            self._alarm(command.text)
        elif isinstance(command, life.Quarantine):
            self._spawn(self.snapshots.quarantine(command))
        elif isinstance(command, life.MakeDurable):
            self._spawn(self.snapshots.make_durable())
        elif isinstance(command, life.EndRun):
            self._finish(command)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.append(task)
        task.add_done_callback(lambda done: self._tasks.remove(done) if done in self._tasks else None)

    # --- news ----------------------------------------------------------------------------------------------------

    def store_said(self, node: str, event: StoreEvent) -> None:
        """News of a store: of the shares of a round, or that it has to go."""
        if event.kind == "terminating":
            self.notices.sigterm(node, "")
        else:
            self.snapshots.rounds.store_said(event)

    def rank_said(self, member: str, event: RankEvent) -> None:
        """News of a rank, as events of the lifecycle."""
        at, generation = now(), event.generation
        if event.kind == "terminating":
            if found := self.machine.state.members.get(member):
                self.notices.sigterm(found.node, member)
        elif event.kind == "formed":
            self.post(life.Formed(at, member, generation, event.took_s))
        elif event.kind == "entered":
            self.post(life.Entered(at, member, generation, event.step, event.share_bytes))
        elif event.kind == "first_step":
            self.post(life.FirstStep(at, member, generation, event.step))
        elif event.kind == "doubtful":
            self.generations.in_doubt(member, generation, event.step)
        elif event.kind == "at_end":
            self.post(life.AtEnd(at, member, generation, event.step))
        elif event.kind == "restored":
            self.journal.note(
                "restored",
                generation=generation,
                member=member,
                step=event.step,
                mode=event.report.get("mode", ""),
                seconds=event.took_s,
                bytes=dict(event.restored_from),
                report=dict(event.report),
            )
            if self.machine.state.rank_of(member) == 0:
                log.info("restored by rank 0: %s", event.report.get("text", ""))
                self.chronicle.restored(generation, event.report)
        elif event.kind == "departed":
            rank = self.machine.state.rank_of(member)
            departure = departure_of(member, event, -1 if rank is None else rank, at)
            self.post(life.Departed(at, generation, departure))

    def _incident_over(self, incident: Any) -> None:
        report = self.chronicle.incident(incident)
        self.journal.note("incident", incident=asdict(report))
        failure_class = incident.culprit.failure_class
        if failure_class and failure_class not in COUNTED:
            told = "noticed" if failure_class == PREEMPTION else "user"
            self.journal.note("failure", **{"class": told})
        elif incident.kind in ("rank", "node", "hang") or failure_class:
            failure = "node" if incident.kind == "node" else "process"
            self.journal.note("failure", **{"class": failure})
            self.journal.note("restore", seconds=incident.rto_s, **{"class": failure})
            self.cadence.observe(Failed(now(), failure))
            self.cadence.observe(Restored(now(), incident.rto_s, failure))

    def _alarm(self, text: str) -> None:
        """Something that a person should see."""
        log.warning("%s", text)
        self.journal.note("alarm", reason=text)
        self.chronicle.alarm(text)

    # --- timers --------------------------------------------------------------------------------------------------

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            await self.journal.flush()

    # --- the end -------------------------------------------------------------------------------------------------

    def remember(self, work: Any) -> None:
        """Let ``work`` bring back what the journal tells of earlier controllers, beside everything else."""
        self._remembered = asyncio.get_running_loop().create_task(work)

    def _finish(self, command: life.EndRun, error: ElasticError | None = None) -> None:
        asyncio.get_running_loop().create_task(self._wind_up(command, error))

    async def _wind_up(self, command: life.EndRun, error: ElasticError | None) -> None:
        """Last metrics, last journal, then everything that the run started is ended, the rendezvous last."""
        if self._ended.is_set():
            return
        with contextlib.suppress(Exception):
            await self.observer.collect()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._remembered is not None:
            await asyncio.wait([self._remembered], timeout=REMEMBER_TIMEOUT_S)
        self.chronicle.ended(command, error, self.cadence, now())
        assert self.chronicle.result is not None
        error = self.chronicle.result.error
        self.journal.note("ended", status=command.status, reason=command.reason, error=plain_error(error))
        await self.journal.flush()
        await self.tear_down()

    async def tear_down(self) -> None:
        """End every process of the run and tell whoever waits for the result, which is known."""
        await self.autoscaler.take_back()
        await self.members.close()
        self.generations.close()
        self._ended.set()
        for heard in self._heard.values():
            if not heard.done():
                heard.set_result(None)
        asyncio.get_running_loop().create_task(self._exit_later())

    async def _exit_later(self) -> None:
        await asyncio.sleep(LINGER_S)
        ray.actor.exit_actor()


ControllerActor = ray.remote(num_cpus=0, max_concurrency=64, max_restarts=-1, max_task_retries=-1)(Controller)
"""Ray starts it again wherever it is killed, and makes the calls again that it had not answered."""
