"""The run as the train function sees it: attach state, take steps, report.

Between two turns of ``run.steps`` lies the boundary: optimizer, scheduler and scaler are done, the next batch is not
yet drawn. Asking for the next batch *is* the boundary, so state is captured there and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, TypeVar, overload

from elastic.clock import now
from elastic.data.ledger import LedgerEntry, LedgerRow, encode_row
from elastic.data.loader import Batch, ElasticLoader
from elastic.errors import CaptureError, ConfigError, SnapshotError
from elastic.gate import BoundaryGate, Interrupted, Order
from elastic.mesh import DATA_AXES
from elastic.progress import BOUNDARY, FIRST_STEP, LOADING, SNAPSHOT, STEP, Progress
from elastic.protocol.shares import PointInTime
from elastic.reduction_order import fix_bucket_layout
from elastic.run_context import RunContext, RunLink, take_up
from elastic.snapshot.capture import Attached
from elastic.snapshot.live_tier import BoundaryGuard, Salvage
from elastic.snapshot.per_rank import OnResize, RankPlace
from elastic.snapshot.restore import RestoreReport
from elastic.snapshot.rng import load_generators, saved_generators, seed_everything
from elastic.snapshot.staging import Stager, capture_and_stage
from elastic.step_metrics import StepMetrics

__all__ = ["Interrupted", "Run", "Stopped"]

log = logging.getLogger("elastic.run")

T = TypeVar("T")


class Stopped(Interrupted):
    """The generation ended at a boundary that all ranks agreed on; everything of this rank is staged."""


class Run:
    """One rank's view of the run, for one generation. Made by the rank; ``elastic.current_run()`` gives it."""

    def __init__(
        self,
        context: RunContext,
        link: RunLink,
        gate: BoundaryGate,
        progress: Progress | None = None,
        metrics: StepMetrics | None = None,
    ) -> None:
        self.name, self.generation, self.rank = context.name, context.generation, context.rank
        self.mesh, self.seed = context.mesh, context.seed
        self.world_size = context.mesh.world_size
        self.coordinate = context.mesh.coordinate(context.rank)
        self.restored: RestoreReport | None = None
        """What the last restore took from where; None after a fresh start."""
        self.share_bytes = 0
        self._context, self._link, self._gate = context, link, gate
        self._progress = progress or Progress()
        self._stager = Stager()
        self._attached: Attached | None = None
        self._guard: BoundaryGuard | None = None
        self._generators: Mapping[str, Any] | None = None
        self._derive_once = False
        self._loader: ElasticLoader | None = None
        self._device_mesh: Any = None
        self._step = 0
        self._ledger: list[tuple[int, LedgerEntry]] = []
        self._metrics = metrics or StepMetrics(context.generation)
        self._stall_s = 0.0

    @property
    def step(self) -> int:
        """Finished steps."""
        return self._step

    @property
    def entered(self) -> bool:
        """Whether the first boundary was reached."""
        return self._guard is not None

    def keep(self, name: str, build: Callable[[], T]) -> T:
        """What ``build()`` makes, made once in this process: the next generation is given the same object.

        For what is dear to build and not state: a tokenizer, a dataset index, a compiled function. It must hold nothing
        of a generation: no process group, no model wrapped in one, no tensor that training changes. A process that
        starts anew builds its own.
        """
        kept = self._context.kept
        if name not in kept:
            kept[name] = build()
        found: T = kept[name]
        return found

    def device_mesh(self, device_type: str | None = None) -> Any:
        """``run.mesh`` as a torch DeviceMesh with the same axes, for ``fully_shard``, ``parallelize_module`` and
        ``distribute_tensor``; ``mesh["dp"]`` is one axis of it.

        ``device_type`` is that of the GPUs if there are any, else ``"cpu"``. Made once in a generation.
        """
        if self._device_mesh is None:
            import torch
            from torch.distributed.device_mesh import init_device_mesh

            kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
            names, sizes = zip(*self.mesh.axes)
            self._device_mesh = init_device_mesh(kind, sizes, mesh_dim_names=names)
        return self._device_mesh

    # --- state ---------------------------------------------------------------------------------------------------

    def attach(self, **named: Any) -> RestoreReport | None:
        """Name the state that decides the next step; restore it if there is something to restore.

        ``named`` may hold modules, optimizers, LR schedulers, loaders, scalers and anything with ``state_dict`` and
        ``load_state_dict``. Call it once in each call of the train function, after building and before ``run.steps``,
        with the same names on all ranks. Returns the restore's report, or None after a fresh start.

        Raises ConfigError if called twice, CaptureError (key and type) for what cannot be saved, ModelMismatch,
        VersionMismatch or TopologyMismatch if the snapshot cannot be taken up as ``RunConfig.restore`` says.
        """
        if self._attached is not None:
            raise ConfigError("attach", sorted(named), "call run.attach once, with everything that is state")
        if not named:
            raise ConfigError("attach", {}, "name at least the model and the optimizer")
        if "run" in named:
            raise ConfigError("attach", "run", "the name is taken by the run's own counters; use another")
        for value in named.values():
            if isinstance(value, ElasticLoader):
                self._bind(value)
            fix_bucket_layout(value)
        self._attached = Attached({**named, "run": self}, self.mesh, self.rank)
        found = self._link.restore_source()
        if found is not None:
            index, source, tier = found
            dataset = self._loader.dataset if self._loader is not None else None
            self.restored = take_up(self._context, self._attached, index, source, tier, dataset)
            if self.restored.mode == "weights" and not self._context.from_other_run:
                self._step = index.step  # else the snapshots to come would be older than this one
            log.info("restored %s", self.restored)
            self._link.restored(self.restored)
        return self.restored

    def _bind(self, loader: ElasticLoader) -> None:
        if self._loader is not None and self._loader is not loader:
            raise ConfigError("loader", "two loaders", "attach one ElasticLoader; put several datasets in a Mixture")
        if self._loader is None:
            self._loader = loader
            loader.bind(self._data_rank(), self._data_size())

    def _data_rank(self) -> int:
        return self.mesh.place(DATA_AXES, self.coordinate)[0]

    def _data_size(self) -> int:
        return self.mesh.place(DATA_AXES, self.coordinate)[1]

    @property
    def elastic_on_resize(self) -> OnResize:
        """What becomes of saved generators on another mesh; all else of the run's own is equal on all ranks."""
        return self._derive_generators if self._context.rng_on_resize == "derive" else "refuse"

    @staticmethod
    def _derive_generators(states: Sequence[Mapping[str, Any]], place: RankPlace) -> dict[str, Any]:
        return {**states[0], "generators": None, "derive": True}

    def state_dict(self) -> dict[str, Any]:
        """The run's own counters: part of every snapshot, so that step and weights cannot part."""
        state: dict[str, Any] = {"step": self._step, "seed": self.seed}
        if self._context.rng == "saved":
            state["generators"] = saved_generators()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the counters of a snapshot."""
        self._step = int(state["step"])
        self._generators = state.get("generators")
        self._derive_once = bool(state.get("derive"))

    # --- steps ---------------------------------------------------------------------------------------------------

    @overload
    def steps(self, loader: ElasticLoader, *, until_step: int | None = None) -> Iterator[Batch]: ...
    @overload
    def steps(self, loader: None = None, *, until_step: int) -> Iterator[None]: ...
    def steps(self, loader: ElasticLoader | None = None, *, until_step: int | None = None) -> Iterator[Any]:
        """One turn is one optimizer step; between two turns is the boundary.

        Yields the batch of each step (None without a loader) until ``until_step`` steps are finished over the run's
        whole life, or the loader's epochs are over. A turn that is left with ``break`` or an exception is not a
        finished step. Ends the generation by raising Interrupted, which the rank catches.
        """
        if self._attached is None:
            raise ConfigError("attach", None, "call run.attach(model=..., optimizer=...) before run.steps")
        if loader is None and until_step is None:
            raise ConfigError("until_step", None, "give run.steps a loader that ends, or until_step")
        if loader is not None and loader is not self._loader:
            raise ConfigError("loader", "not attached", "pass the loader to run.attach as well: its cursor is state")
        return self._steps(loader, until_step)

    def _steps(self, loader: ElasticLoader | None, until_step: int | None) -> Iterator[Batch | None]:
        gate, link, context = self._gate, self._link, self._context
        derived = context.rng == "derived"
        seed, coordinate, ledger = self.seed, self.coordinate, self._ledger
        keeps_ledger = all(at == 0 for axis, at in coordinate.items() if axis not in DATA_AXES)
        self._enter()
        guard, shared = self._guard, self.world_size > 1
        assert guard is not None
        mark, enter = guard.mark, self._progress.enter
        first, phase = True, FIRST_STEP
        turn_started, self._stall_s = now(), 0.0  # the snapshot of the first boundary is no part of the first step
        while until_step is None or self._step < until_step:
            if derived:
                seed_everything(seed, self._step, coordinate)
            batch = None
            if loader is not None:
                enter(LOADING, self._step)
                batch = loader.fetch()
                if batch is None:
                    break
            enter(phase, self._step)
            yield batch
            enter(BOUNDARY, self._step)
            if guard.doubtful and shared:
                # A step whose collective failed, in code that swallowed the error, must not count as one.
                link.doubtful(self._step)
                gate.await_clear(self._step)
            if loader is not None:
                entry = loader.advance()
                if keeps_ledger:
                    ledger.append((self._step, entry))
            self._step += 1
            mark()
            if first:
                first, phase = False, STEP
                self._publish_share_bytes()
                link.first_step(self._step)
            samples = loader.samples_seen if loader is not None else 0
            self._metrics.ended(self._step, now() - turn_started - self._stall_s, samples)
            turn_started, self._stall_s = now(), 0.0
            order = gate.arrive(self._step)
            if order is not None:
                self._stage(order)
        self._leave()

    def _enter(self) -> None:
        """The first boundary: say what a share takes, and wait for the snapshot of step 0 where there is none yet."""
        assert self._attached is not None
        self._guard = BoundaryGuard(self._attached)
        self._guard.mark()
        if self._context.rng == "saved" and self._generators is not None:
            load_generators(self._generators)
        elif self._derive_once:
            seed_everything(self.seed, self._step, self.coordinate)
        self._progress.enter(BOUNDARY, self._step)
        self._publish_share_bytes()
        if self._context.hold:
            self._gate.will_hold(self._step)
        else:
            self._gate.arrive(self._step)
        self._link.formed_state(self.share_bytes, self._step)
        if self._context.hold:
            self._stage(self._gate.hold(self._step))

    def _leave(self) -> None:
        """The last boundary: wait for the snapshot of the end. A voluntary stop that was armed here comes first."""
        self._progress.enter(BOUNDARY, self._step)
        self._publish_share_bytes()
        self._gate.will_hold(self._step)
        self._link.at_end(self._step)
        self._stage(self._gate.hold(self._step))

    def _publish_share_bytes(self) -> None:
        assert self._attached is not None
        self.share_bytes = self._attached.share_bytes()

    def _stage(self, order: Order) -> None:
        """Copy this rank's share into its slot; leave if the order says stop."""
        started = now()
        assert self._attached is not None
        self._progress.enter(SNAPSHOT, self._step)
        # Rows stay until a commit that covers them is known: an attempt that comes to nothing must not take them along.
        self._ledger[:] = [row for row in self._ledger if row[0] >= order.committed_step]
        try:
            share = capture_and_stage(
                self._attached,
                self._stager,
                order.slot,
                attempt=order.attempt,
                point=self._point(),
                ledger=self._ledger_rows(),
            )
        except SnapshotError as error:
            self._publish_share_bytes()
            self._link.stage_failed(order.attempt, str(error))
            if isinstance(error, CaptureError):
                raise
        else:
            self._link.staged(share)
            self._progress.enter(BOUNDARY, self._step)
            if order.synchronous and not order.stop:
                self._gate.await_release(order.attempt)
        self._stall_s += now() - started
        if order.stop:
            raise Stopped

    def salvage(self) -> tuple[Salvage | None, str]:
        """After a failure: what this rank still holds of its last boundary, or why that cannot be proven.

        Called by the rank when the train function has been left, before its objects are let go.
        """
        if self._attached is None or self._guard is None:
            return None, "the rank had not reached its first boundary"
        if self._context.rng == "saved":
            return None, "saved generator states of a lost rank are gone; rng='derived' needs none"
        if self._attached.broken:
            return None, self._attached.broken
        return Salvage.of(self._attached, self._guard, self._point(), self._ledger_rows())

    def _ledger_rows(self) -> tuple[str, ...]:
        """What this rank consumed and no commit covers yet; it becomes part of the commit that does."""
        rank, size = self._data_rank(), self._data_size()
        return tuple(
            encode_row(LedgerRow(self.generation, step, rank, size, e.start, e.stop, e.digest, e.tokens))
            for step, e in self._ledger
        )

    def _point(self) -> PointInTime:
        assert self._attached is not None
        loader = self._loader
        return PointInTime(
            generation=self.generation,
            step=self._step,
            data_cursor=loader.cursor if loader is not None else 0,
            samples_seen=loader.samples_seen if loader is not None else 0,
            tokens_seen=loader.tokens_seen if loader is not None else 0,
            optimizer_steps=self._attached.optimizer_steps(),
            scheduler_steps=self._attached.scheduler_steps(),
        )

    # --- phases --------------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str, *, limit_s: float | None = None) -> Iterator[None]:
        """What is done in the block is called ``name``, and is no step: an evaluation, say, in which the other ranks
        wait for this one. It may last ``limit_s`` seconds before it is taken for a hang; None: as long as it likes.

        Raises ConfigError for an empty name or a limit that is not above 0.
        """
        if not name:
            raise ConfigError("phase", name, "give it a name")
        if limit_s is not None and not limit_s > 0:
            raise ConfigError("limit_s", limit_s, "use seconds above 0, or None for no limit")
        with self._progress.named(name, self._step, inf if limit_s is None else limit_s):
            yield

    # --- reports -------------------------------------------------------------------------------------------------

    def report(self, **metrics: Any) -> None:
        """Metrics of the step in hand. Those of rank 0 count; another rank's stand in for a step whose row was lost
        with it. Tensors are copied, and read later, off the train thread."""
        self._metrics.report(self._step + 1, metrics)

    def check_attached(self) -> None:
        """Raise ConfigError if the train function returned without naming any state: nothing of it could be saved."""
        if self._attached is None:
            raise ConfigError("attach", None, "the train function never called run.attach(model=..., optimizer=...)")

    def close(self) -> None:
        """Let go of the user's objects and stop the loader's workers."""
        if self._loader is not None:
            self._loader.close()
        if self._guard is not None:
            self._guard.close()
        self._attached = self._loader = self._guard = self._device_mesh = None
