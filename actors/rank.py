"""One training rank: a process that outlives generations. The train function runs in a thread of its own.

The RPC threads stay free whatever the train thread does, so a rank always answers: orders reach the boundary gate,
news go to the outbox.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import ray

from actors.breaking import cut_connections, own_stacks
from actors.fence import Fenced
from actors.interfaces import interface_of
from actors.last_words import leave_last_words
from actors.names import NAMESPACE, store_name
from actors.outbox import Outbox
from actors.progress_page import PageWriter
from actors.rank_orders import GenerationOrder, LiveOrder, RankEvent, RankSpec, departure_of
from actors.terminate import on_sigterm
from elastic.gate import BoundaryGate, Order
from elastic.observe.prints import LineFile, Tee, prints_directory
from elastic.progress import Progress
from elastic.protocol.adoption import RankFacts
from elastic.step_metrics import Row

if TYPE_CHECKING:
    from actors.train_thread import TrainThread


class Rank(Fenced):
    """The actor. Every method but the train thread's own returns at once."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.outbox = Outbox()
        self.store = ray.get_actor(store_name(spec.run, spec.node), namespace=NAMESPACE)
        self._gate = BoundaryGate()
        self._generation = self._interrupted = -1
        self._train: TrainThread | None = None
        lines = LineFile(prints_directory(spec.run, spec.node), spec.member, self._place)
        sys.stdout, sys.stderr = Tee(sys.stdout, "stdout", lines), Tee(sys.stderr, "stderr", lines)
        self._warming = threading.Lock()
        self._news = threading.Lock()
        self._facts = RankFacts(spec.member, spec.node, False)
        """Of the generation in hand; changed together with the outbox."""
        leave_last_words(spec.words)
        on_sigterm(lambda: self._tell(RankEvent("terminating", self._generation, self._gate.step)))
        self._progress = Progress(spec.phases)
        self._page = PageWriter(spec.pages, spec.member, self._progress)

    # --- calls of the controller ---------------------------------------------------------------------------------

    def warm_up(self) -> int:
        """Load what the first generation needs: torch, the user's code. Raises what loading it raises."""
        from actors.train_thread import TrainThread

        with self._warming:
            if self._train is None:
                if interface := interface_of(ray.util.get_node_ip_address()):
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                self._train = TrainThread(self.spec, self.store, self._tell, _cores_of_actor(), self._progress)
                self._page.work.follow(self._train.thread)
        return os.getpid()

    def account(self) -> tuple[RankFacts, int]:
        """What a new controller has to know, and the number of the first event that is not in it."""
        with self._news:
            gate = self._gate.orders()
            facts = replace(
                self._facts,
                warm=self._train is not None,
                interrupted=self._interrupted,
                holding=gate.holding,
                ordered=gate.order.attempt if gate.order else "",
                ordered_step=gate.order.step if gate.order else -1,
                confirmed=gate.confirmed,
                staged=gate.taken.attempt if gate.taken else "",
                staged_step=gate.taken.step if gate.taken else -1,
            )
            return facts, self.outbox.following

    def _place(self) -> tuple[int, int]:
        ranks = self._facts.ranks
        return (ranks.index(self.spec.member) if ranks else -1), self._generation

    def _tell(self, event: RankEvent) -> None:
        with self._news:
            if event.generation == self._generation:
                self._facts = noted(self._facts, event)
            self.outbox.put(event)

    def begin(self, order: GenerationOrder) -> bool:
        """Enter the train function for a generation. False for one that is not newer than the last, or was interrupted
        before it came."""
        if order.generation <= self._generation:
            return False
        with self._news:
            self._generation = self._page.generation = order.generation
            self._gate = BoundaryGate()
            self._facts = RankFacts(
                self.spec.member,
                self.spec.node,
                True,
                order.generation,
                ranks=order.ranks,
                mesh=order.mesh,
                restoring=order.restore,
            )
        if order.generation <= self._interrupted:
            self._tell(RankEvent("departed", order.generation, -1, cause="interrupted"))
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
        if generation == self._generation and self._train is not None and self._facts.live != order.attempt:
            with self._news:
                self._facts = replace(self._facts, live=order.attempt)
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

    def poll(self, after: int, timeout_s: float, written: tuple[int, int]) -> tuple[int, list[RankEvent]]:
        """News; see Outbox.poll. Rows of metrics up to ``written`` (generation and step) are in the journal."""
        if self._train is not None:
            self._train.metrics.forget(written)
        return self.outbox.poll(after, timeout_s)

    def metrics_after(self, heard: tuple[int, int]) -> tuple[int, int, list[Row]]:
        """(generation, samples seen, rows) of the finished steps after ``heard`` (generation and step) in the
        generation in hand, or the last one."""
        return self._train.metrics.after(heard) if self._train is not None else (-1, 0, [])


def noted(facts: RankFacts, event: RankEvent) -> RankFacts:
    """``facts`` after the rank said ``event``."""
    if event.kind == "entered":
        return replace(facts, entered=event.step, share_bytes=event.share_bytes)
    if event.kind == "first_step":
        return replace(facts, stepped=True)
    if event.kind == "at_end":
        return replace(facts, at_end=event.step)
    if event.kind == "doubtful":
        return replace(facts, doubtful=event.step)
    if event.kind == "departed":
        return replace(facts, departure=departure_of(facts.member, event))
    return facts


def _cores_of_actor() -> int:
    resources: Mapping[str, float] = ray.get_runtime_context().get_assigned_resources()
    return max(1, int(resources.get("CPU", 1)))


RankActor = ray.remote(num_cpus=0, max_concurrency=16, max_restarts=0)(Rank)
