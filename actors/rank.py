"""One training rank: a process that outlives generations. The train function runs in a thread of its own.

The RPC threads stay free whatever the train thread does, so a rank always answers: orders reach the boundary gate,
news go to the outbox.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import ray

from actors.breaking import cut_connections, own_stacks
from actors.last_words import leave_last_words
from actors.names import NAMESPACE, store_name
from actors.outbox import Outbox
from actors.progress_page import PageWriter
from actors.rank_orders import GenerationOrder, LiveOrder, RankEvent, RankSpec
from actors.terminate import on_sigterm
from elastic.gate import BoundaryGate, Order
from elastic.progress import Progress

if TYPE_CHECKING:
    from actors.train_thread import TrainThread


class Rank:
    """The actor. Every method but the train thread's own returns at once."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.outbox = Outbox()
        self.store = ray.get_actor(store_name(spec.run, spec.node), namespace=NAMESPACE)
        self._gate = BoundaryGate()
        self._generation = self._interrupted = -1
        self._train: TrainThread | None = None
        leave_last_words(spec.words)
        on_sigterm(lambda: self.outbox.put(RankEvent("terminating", self._generation, self._gate.step)))
        self._progress = Progress(spec.phases)
        self._page = PageWriter(spec.pages, spec.member, self._progress)

    # --- calls of the controller ---------------------------------------------------------------------------------

    def warm_up(self) -> int:
        """Load what the first generation needs: torch, the user's code. Raises what loading it raises."""
        from actors.train_thread import TrainThread

        self._train = TrainThread(self.spec, self.store, self.outbox.put, _cores_of_actor(), self._progress)
        return os.getpid()

    def begin(self, order: GenerationOrder) -> bool:
        """Enter the train function for a generation. False for one that is not newer than the last, or was interrupted
        before it came."""
        if order.generation <= self._generation:
            return False
        self._generation = self._page.generation = order.generation
        self._gate = BoundaryGate()
        if order.generation <= self._interrupted:
            self.outbox.put(RankEvent("departed", order.generation, -1, cause="interrupted"))
            return False
        assert self._train is not None
        self._train.begin(order, self._gate)
        return True

    def propose(self, generation: int, order: Order) -> tuple[bool, int]:
        """(accepted, step reached): see BoundaryGate.propose. A foreign generation is refused."""
        if generation != self._generation:
            return False, -1
        return self._gate.propose(order)

    def confirm(self, generation: int, attempt: str, step: int) -> None:
        """Act on the accepted order."""
        if generation == self._generation:
            self._gate.confirm(attempt, step)

    def clear(self, generation: int, step: int) -> None:
        """Every rank was found alive after ``step`` was called into doubt."""
        if generation == self._generation:
            self._gate.clear(step)

    def release(self, generation: int, attempt: str) -> None:
        """Forget the attempt."""
        if generation == self._generation:
            self._gate.release(attempt)

    def interrupt(self, generation: int) -> None:
        """End the generation here; one that has not begun here will not."""
        self._interrupted = max(self._interrupted, generation)
        if generation == self._generation:
            self._gate.interrupt()

    def forget(self) -> None:
        """Let go of what was kept of the last boundary: the run goes on without this rank."""
        if self._train is not None:
            self._train.salvage_with(None)

    def salvage(self, generation: int, order: LiveOrder) -> None:
        """Stage a share of what was kept of the last boundary of ``generation``."""
        if generation == self._generation and self._train is not None:
            self._train.salvage_with(order)

    def status(self) -> tuple[int, int, int]:
        """(generation, finished steps, bytes of a share). Also the probe: whoever answers is alive."""
        run = self._train.run if self._train else None
        return self._generation, self._gate.step, run.share_bytes if run else 0

    def cut(self, address: str) -> int:
        """Break every connection to a node that is silent, which nobody resets. Returns how many."""
        return cut_connections(address)

    def stacks(self) -> str:
        """The stacks of all threads of this process, for where nobody else can read them."""
        return own_stacks()

    def poll(self, after: int, timeout_s: float) -> tuple[int, list[RankEvent]]:
        """News; see Outbox.poll."""
        return self.outbox.poll(after, timeout_s)

    def take_metrics(self) -> tuple[int, int, list[tuple[int, float, dict[str, float]]]]:
        """(generation, samples seen, rows) of steps finished since the last call."""
        run = self._train.run if self._train else None
        return (self._generation, *run.take_metrics()) if run else (self._generation, 0, [])


def _cores_of_actor() -> int:
    resources: Mapping[str, float] = ray.get_runtime_context().get_assigned_resources()
    return max(1, int(resources.get("CPU", 1)))


RankActor = ray.remote(num_cpus=0, max_concurrency=16, max_restarts=0)(Rank)
