"""The boundary gate as plain data: what ``BoundaryGate`` does, with a wait as an answer instead of a blocked thread.

``tests/unit/test_gate.py`` holds the two against each other, so that simulations may trust this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.gate import Order

WAIT = "wait"
INTERRUPTED = "interrupted"


@dataclass(slots=True)
class GateModel:
    """``arrive`` and ``hold`` answer with an order, None, WAIT (ask again after the next change) or INTERRUPTED."""

    step: int = 0
    order: Order | None = None
    confirmed: bool = False
    interrupted: bool = False
    held_at: int | None = None
    released: set[str] = field(default_factory=set)

    def arrive(self, step: int) -> Order | str | None:
        self.step = step
        if self.interrupted:
            return INTERRUPTED
        if self.order is None or self.order.step != step:
            return None
        return self._take() if self.confirmed else WAIT

    def will_hold(self, step: int) -> None:
        self.step, self.held_at = step, step

    def hold(self, step: int) -> Order | str:
        if self.interrupted:
            self.held_at = None
            return INTERRUPTED
        if self.order is not None and self.order.step == step and self.confirmed:
            self.held_at = None
            return self._take()
        return WAIT

    def _take(self) -> Order:
        order = self.order
        assert order is not None
        self.order, self.confirmed = None, False
        return order

    def propose(self, order: Order) -> tuple[bool, int]:
        if order.attempt in self.released:
            return False, self.step
        self.order, self.confirmed = None, False
        held = self.held_at == order.step and (order.held or order.stop)
        accepted = self.step < order.step or held
        if accepted:
            self.order = order
        return accepted, self.step

    def confirm(self, attempt: str, step: int) -> None:
        if self.order is not None and (self.order.attempt, self.order.step) == (attempt, step):
            self.confirmed = True

    def release(self, attempt: str) -> None:
        self.released.add(attempt)
        if self.order is not None and self.order.attempt == attempt:
            self.order, self.confirmed = None, False

    def interrupt(self) -> None:
        self.interrupted = True
