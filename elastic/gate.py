"""The boundary between two steps, as a place where the train thread and the controller's orders meet.

The train thread passes through ``arrive`` at each boundary. While nobody wants anything that costs one attribute
write and one read; no lock is taken. Orders arrive on another thread of the rank's process.

Safe without a lock on the fast path because of the order of accesses: the train thread writes its step and then reads
``_attention``; an order sets ``_attention`` and then reads the step. One of the two sees the other.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from elastic.protocol.shares import SlotRef


class Interrupted(BaseException):
    """Unwinds the train function. Not an Exception, so that user code around a step does not swallow it."""


@dataclass(frozen=True, slots=True)
class Order:
    """Stage at ``step`` into ``slot``, and leave there if ``stop``."""

    attempt: str
    step: int
    slot: SlotRef
    stop: bool
    committed_step: int = 0
    """The newest step that is committed: what a rank consumed before it is in the journal."""
    synchronous: bool = False
    """Training waits at ``step`` until the snapshot is durable, or given up: ``release`` tells."""
    held: bool = False
    """For ranks that hold at ``step``. A rank that holds takes no other order for the step it holds at, but a stop:
    a passing snapshot would let it go from a boundary where it has to be met."""


@dataclass(frozen=True, slots=True)
class GateOrders:
    """What a gate has been told: see ``BoundaryGate.orders``."""

    order: Order | None
    confirmed: bool
    holding: bool
    """The train thread waits, or is about to, at a boundary where everybody is held."""
    taken: Order | None
    """The last order that the train thread acted on."""


class BoundaryGate:
    """One generation's gate. ``step`` counts finished steps."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self._attention = False
        self._order: Order | None = None
        self._confirmed = False
        self._interrupted = False
        self._held_at: int | None = None
        self._released: set[str] = set()
        self._cleared = -1
        self._taken: Order | None = None
        self._condition = threading.Condition()

    # --- the train thread --------------------------------------------------------------------------------------------

    def arrive(self, step: int) -> Order | None:
        """At the boundary after ``step`` steps: the confirmed order for it, or None. Raises Interrupted."""
        self.step = step
        if not self._attention:
            return None
        with self._condition:
            while True:
                if self._interrupted:
                    raise Interrupted
                order = self._order
                if order is None or order.step != step:
                    self._attention = order is not None
                    return None
                if self._confirmed:
                    return self._take(order)
                self._condition.wait()

    def _take(self, order: Order) -> Order:
        self._order, self._confirmed, self._attention, self._taken = None, False, False, order
        return order

    def will_hold(self, step: int) -> None:
        """Announce ``hold`` before telling the controller, so that an order that comes at once is accepted."""
        with self._condition:
            self.step, self._held_at = step, step

    def hold(self, step: int) -> Order:
        """Wait at this boundary until a snapshot of exactly this step is ordered. Raises Interrupted."""
        with self._condition:
            try:
                while True:
                    if self._interrupted:
                        raise Interrupted
                    order = self._order
                    if order is not None and order.step == step and self._confirmed:
                        return self._take(order)
                    self._condition.wait()
            finally:
                self._held_at = None

    def await_clear(self, step: int) -> None:
        """Wait until the controller has found every rank alive. Raises Interrupted where one is not."""
        with self._condition:
            while self._cleared < step:
                if self._interrupted:
                    raise Interrupted
                self._condition.wait()

    def await_release(self, attempt: str) -> None:
        """Wait until ``attempt`` is over: durable, or given up. Raises Interrupted."""
        with self._condition:
            while attempt not in self._released:
                if self._interrupted:
                    raise Interrupted
                self._condition.wait()

    def check(self) -> None:
        """Raise Interrupted if the generation is over; for places that wait outside of a boundary."""
        if self._interrupted:
            raise Interrupted

    # --- orders ------------------------------------------------------------------------------------------------------

    def propose(self, order: Order) -> tuple[bool, int]:
        """(accepted, step reached). Accepted: the train thread will wait at ``order.step`` for the confirmation.

        An attempt that was released before its proposal came changes nothing: nobody would ever confirm it.
        """
        with self._condition:
            if order.attempt in self._released:
                return False, self.step
            self._order, self._confirmed, self._attention = order, False, True
            reached = self.step
            accepted = reached < order.step or (self._held_at == order.step and (order.held or order.stop))
            if not accepted:
                self._order, self._attention = None, self._interrupted
            self._condition.notify_all()
            return accepted, reached

    def orders(self) -> GateOrders:
        """What was told and what was done, at one moment: for a controller that comes back."""
        with self._condition:
            return GateOrders(self._order, self._confirmed, self._held_at is not None, self._taken)

    def confirm(self, attempt: str, step: int) -> None:
        """Let the train thread act on the order it accepted."""
        with self._condition:
            if self._order is not None and (self._order.attempt, self._order.step) == (attempt, step):
                self._confirmed = True
                self._condition.notify_all()

    def clear(self, step: int) -> None:
        """Every rank was alive after ``step`` was called into doubt."""
        with self._condition:
            self._cleared = max(self._cleared, step)
            self._condition.notify_all()

    def release(self, attempt: str) -> None:
        """Forget ``attempt``; a train thread that waits for it goes on. A hold goes on holding."""
        with self._condition:
            self._released.add(attempt)
            if self._order is not None and self._order.attempt == attempt:
                self._order, self._confirmed = None, False
            self._condition.notify_all()

    def interrupt(self) -> None:
        """End the generation: the train thread leaves at its next boundary, or now if it waits at one."""
        with self._condition:
            self._interrupted = self._attention = True
            self._condition.notify_all()
