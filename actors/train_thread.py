"""The thread of a rank that trains: forms groups, calls the train function, and tells how it was left.

It lives as long as the process and goes through one generation after another. Only it touches torch.distributed.

torch.distributed.nn.functional, which torch._dynamo brings along, takes the default group of the moment it is imported
into its functions' default arguments. Imported late it would keep the first generation's group alive, its sockets open,
and peers waiting for a rank that has long left; so both are imported here, before there is any group. It also takes
seconds, which a rank that is warm has behind it.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.parallel

from actors.death import evidence_in
from actors.process_groups import leave_process_groups
from actors.rank_orders import GenerationOrder, LiveOrder, RankEvent, RankSpec
from actors.shares import StoreReader
from elastic.clock import now
from elastic.errors import (
    ConfigError,
    ElasticError,
    ModelMismatch,
    RestoreError,
    SnapshotError,
    TopologyMismatch,
    VersionMismatch,
)
from elastic.gate import BoundaryGate, Interrupted
from elastic.mesh_identity import set_mesh_generation
from elastic.progress import BUILDING, FORMING, IDLE, Progress
from elastic.protocol.shares import StagedShare
from elastic.run import Run, Stopped
from elastic.run_context import BUILD_STEP, RunContext
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.live_tier import Salvage
from elastic.snapshot.restore import ChunkSource, RestoreReport
from elastic.snapshot.rng import seed_everything
from elastic.step_metrics import StepMetrics
from elastic.train_function import call_train_function, set_current_run

_UNFIT = (ModelMismatch, VersionMismatch, TopologyMismatch)
"""The snapshot is good and does not fit what the program attached: another one would not either."""

_PEER_GONE = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket closed",
    "software caused connection abort",
    "timed out waiting",
    "nccl communicator was aborted",
    "remote process exited",
)


def is_collateral(error: BaseException) -> bool:
    """Whether ``error`` or what it came from only says that a peer went away."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (dist.DistError, ConnectionError)):
            return True
        if isinstance(seen, RuntimeError) and any(mark in str(seen).lower() for mark in _PEER_GONE):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@dataclass
class _Link:
    """The run's way out of the train thread: to the outbox and to the node's store."""

    thread: TrainThread
    order: GenerationOrder
    generation: int = field(init=False)

    def __post_init__(self) -> None:
        self.generation = self.order.generation

    def restore_source(self) -> tuple[SnapshotIndex, ChunkSource, str] | None:
        if self.order.restore is None:
            return None
        order = self.order
        return self.thread.reader.open(order.restore, order.generation, order.rank, order.local_world_size)

    def formed_state(self, share_bytes: int, step: int) -> None:
        self.thread.tell(RankEvent("entered", self.generation, step, share_bytes=share_bytes))

    def first_step(self, step: int) -> None:
        self.thread.tell(RankEvent("first_step", self.generation, step))

    def doubtful(self, step: int) -> None:
        self.thread.tell(RankEvent("doubtful", self.generation, step))

    def at_end(self, step: int) -> None:
        self.thread.tell(RankEvent("at_end", self.generation, step))

    def staged(self, share: StagedShare) -> None:
        self.thread.store.seal.remote(share, self.generation)

    def stage_failed(self, attempt: str, reason: str) -> None:
        self.thread.store.refuse.remote(attempt, self.order.rank, reason)

    def restored(self, report: RestoreReport) -> None:
        self.thread.reader.done()
        self.thread.tell(
            RankEvent(
                "restored",
                self.generation,
                report.step,
                took_s=report.seconds,
                restored_from=dict(report.bytes_from),
                report={**report.summary(), "text": str(report)},
            )
        )


class TrainThread:
    """``tell`` takes news for the controller, ``store`` is the node's store actor."""

    def __init__(
        self, spec: RankSpec, store: Any, tell: Callable[[RankEvent], None], cores: int, progress: Progress
    ) -> None:
        self.spec, self.store, self.tell = spec, store, tell
        self.reader = StoreReader(spec.run, spec.node)
        self.run: Run | None = None
        self._kept: dict[str, Any] = {}
        self.progress = progress
        self._live_orders: queue.SimpleQueue[LiveOrder | None] = queue.SimpleQueue()
        self._salvage: Salvage | None = None
        self._live_reason = ""
        self._world: Any = None
        """The group of the generation: it must not go before it is left, also where user code has destroyed it."""
        self.metrics = StepMetrics(-1)
        """Of the generation in hand, or the last one."""
        self._orders: queue.SimpleQueue[tuple[GenerationOrder, BoundaryGate]] = queue.SimpleQueue()
        if not spec.use_gpu:
            torch.set_num_threads(cores)
        elif torch.cuda.is_available():
            torch.cuda.init()
        self._entry = spec.entry.load()
        # What is loaded now stays; a collection after each generation has only the generation's objects to look at.
        gc.collect()
        gc.freeze()
        self.thread = threading.Thread(target=self._loop, name="train", daemon=True)
        self.thread.start()

    def begin(self, order: GenerationOrder, gate: BoundaryGate) -> None:
        """Go through this generation when the one before has been left."""
        self.salvage_with(None)
        self._orders.put((order, gate))

    def salvage_with(self, order: LiveOrder | None) -> None:
        """Stage what was kept of the last boundary, or (None) let go of it."""
        self._live_orders.put(order)

    def _loop(self) -> None:
        while True:
            order, gate = self._orders.get()
            while not self._live_orders.empty():
                self._live_orders.get()
            event = self._generation(order, gate)
            self.progress.enter(IDLE, gate.step)
            kept, self._salvage = self._salvage, None
            self.tell(
                replace(
                    event,
                    live_bytes=kept.nbytes if kept else 0,
                    live_slack_bytes=kept.slack_bytes if kept else 0,
                    live_reason=self._live_reason,
                )
            )
            if kept is not None:
                self._stage_live(kept, order.generation)
            del kept

    def _stage_live(self, kept: Salvage, generation: int) -> None:
        """Wait for the order to stage what was kept, or for the next generation, which needs the memory."""
        live = self._live_orders.get()
        if live is None:
            return
        try:
            share = kept.stage(live.attempt, live.slot, live.place, live.survivors)
        except SnapshotError as error:
            self.store.refuse.remote(live.attempt, live.place, str(error))
        else:
            self.store.seal.remote(share, generation)

    def _generation(self, order: GenerationOrder, gate: BoundaryGate) -> RankEvent:
        """One generation, from forming the group to leaving it; always answers with how it was left."""
        event: RankEvent | None = None
        self._salvage, self._live_reason = None, ""
        try:
            self._form(order, gate)
            context = RunContext(
                self.spec.run,
                order.generation,
                order.rank,
                order.mesh,
                self.spec.seed,
                self.spec.rng,
                self.spec.rng_on_resize,
                order.hold,
                self._kept,
                restore=order.how,
                versions=self.spec.versions,
                from_other_run=order.restore is not None and bool(order.restore.other_run),
            )
            self.metrics = StepMetrics(order.generation)
            run = self.run = Run(context, _Link(self, order), gate, self.progress, self.metrics)
            set_current_run(run)
            seed_everything(self.spec.seed, BUILD_STEP, {})
            call_train_function(self._entry, self.spec.config)
            run.check_attached()
            return RankEvent("departed", order.generation, gate.step, cause="finished")
        except Stopped:
            event = RankEvent("departed", order.generation, gate.step, cause="interrupted")
        except Interrupted:
            self._keep()
            event = RankEvent("departed", order.generation, gate.step, cause="interrupted")
        except BaseException as error:  # whatever the user's code raises is news for the controller
            event = self._failure(order, gate, error)
            if event.cause == "error":
                self._keep()
            _forget_frames(error)
        finally:
            set_current_run(None)
            if event is not None:
                self._leave_group()
        return event

    def _form(self, order: GenerationOrder, gate: BoundaryGate) -> None:
        """Meet the other ranks under the generation's prefix, then form the process group."""
        started = now()
        self.progress.enter(FORMING, 0)
        self._leave_group()
        size, rank = order.mesh.world_size, order.rank
        host, port = order.rendezvous
        timeout = timedelta(seconds=self.spec.collective_timeout_s)
        store = dist.PrefixStore(
            f"generation-{order.generation}", dist.TCPStore(host, port, is_master=False, timeout=timeout)
        )
        # Meeting first, in a wait that can be interrupted: init_process_group cannot be.
        store.set(f"here-{rank}", b"1")
        everyone = [f"here-{other}" for other in range(size)]
        while not store.check(everyone):
            gate.check()
            time.sleep(0.002)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(order.local_rank),
            LOCAL_WORLD_SIZE=str(order.local_world_size),
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
        )
        backend = "cpu:gloo,cuda:nccl" if self.spec.use_gpu and torch.cuda.is_available() else "gloo"
        set_mesh_generation(order.generation)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        self._world = dist.group.WORLD
        self.tell(RankEvent("formed", order.generation, took_s=now() - started))
        self.progress.enter(BUILDING, 0)

    def _leave_group(self) -> None:
        """Drop the run's objects and the group, so that peers that wait for this rank learn of it at once."""
        world, self._world = self._world, None
        leave_process_groups(self._let_go)
        del world

    def _let_go(self) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.close()
            del run
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def _keep(self) -> None:
        """Keep the state of the last boundary, if it can be proven to be that."""
        if self.run is not None:
            self._salvage, self._live_reason = self.run.salvage()

    def _failure(self, order: GenerationOrder, gate: BoundaryGate, error: BaseException) -> RankEvent:
        text = f"{type(error).__name__}: {error}".strip().rstrip(":")
        where = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if isinstance(error, RestoreError) and not isinstance(error, _UNFIT):
            cause = "unreadable"
        elif isinstance(error, (ConfigError, SnapshotError, *_UNFIT)):
            cause = "refused"
        else:
            cause = "error"
        types, errno = evidence_in(error)
        return RankEvent(
            "departed",
            order.generation,
            gate.step if self.run is not None and self.run.entered else -1,
            cause=cause,
            error_types=types,
            errno=errno,
            error=text,
            traceback=where,
            collateral=cause == "error" and is_collateral(error),
            failure=error if isinstance(error, ElasticError) else None,
        )


def _forget_frames(error: BaseException) -> None:
    """Free what the traceback holds: the user's model must not outlive its generation."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__cause__ or seen.__context__
