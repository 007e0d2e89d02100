"""The boundary gate: orders meet the train thread, whoever comes first, and no order leaves it waiting for ever."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from support.made_up_gate import INTERRUPTED, WAIT, GateModel

from elastic.gate import BoundaryGate, Interrupted, Order
from elastic.protocol.shares import SlotRef

SLOT = SlotRef("/slot", 1, 0)
DEADLINE_S = 20.0


def order(attempt: str, step: int, *, stop: bool = False, held: bool = False) -> Order:
    return Order(attempt, step, SLOT, stop, held=held)


class TrainThread:
    """Calls one gate method in a thread; ``waits`` returns once the thread is inside the gate's condition."""

    def __init__(self, gate: BoundaryGate, call: Callable[[], Any]) -> None:
        self.gate = gate
        self.answer: Any = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.answer = call()
        except Interrupted:
            self.answer = INTERRUPTED
        self.done.set()

    def waits(self) -> bool:
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            with self.gate._condition:
                if self.gate._condition._waiters:  # type: ignore[attr-defined]
                    return True
            if self.done.wait(0.0005):
                return False
        raise AssertionError("the train thread neither waits nor returns")

    def result(self) -> Any:
        assert self.done.wait(DEADLINE_S), "the train thread waits for ever"
        return self.answer


def test_nobody_wants_anything_and_the_train_thread_passes() -> None:
    gate = BoundaryGate()
    assert [gate.arrive(step) for step in range(1, 5)] == [None] * 4
    assert gate.step == 4


def test_an_order_ahead_is_accepted_and_met_at_its_step() -> None:
    gate = BoundaryGate()
    gate.arrive(1)
    assert gate.propose(order("a", 3)) == (True, 1)
    gate.confirm("a", 3)
    assert gate.arrive(2) is None
    assert gate.arrive(3) == order("a", 3)
    assert gate.arrive(4) is None


def test_an_order_for_a_step_that_is_reached_is_refused_with_that_step() -> None:
    gate = BoundaryGate()
    gate.arrive(3)
    assert gate.propose(order("a", 3)) == (False, 3)
    assert gate.arrive(4) is None


def test_the_train_thread_waits_at_an_accepted_boundary_until_it_is_confirmed() -> None:
    gate = BoundaryGate()
    gate.propose(order("a", 1))
    train = TrainThread(gate, lambda: gate.arrive(1))
    assert train.waits()
    gate.confirm("b", 1)
    gate.confirm("a", 2)
    assert train.waits()
    gate.confirm("a", 1)
    assert train.result() == order("a", 1)


@pytest.mark.parametrize(
    ("act", "answer"),
    [
        (lambda gate: gate.release("a"), None),
        (lambda gate: gate.propose(order("a", 9)), None),
        (lambda gate: gate.interrupt(), INTERRUPTED),
    ],
    ids=["released", "a later step is named", "interrupted"],
)
def test_a_thread_that_waits_at_a_boundary_goes_on_when_it_is(act: Callable[[BoundaryGate], Any], answer: Any) -> None:
    gate = BoundaryGate()
    gate.propose(order("a", 1))
    train = TrainThread(gate, lambda: gate.arrive(1))
    assert train.waits()
    act(gate)
    assert train.result() == answer


def test_an_interrupt_is_met_at_the_next_boundary() -> None:
    gate = BoundaryGate()
    gate.arrive(1)
    gate.check()
    gate.interrupt()
    with pytest.raises(Interrupted):
        gate.arrive(2)
    with pytest.raises(Interrupted):
        gate.check()


def test_a_refused_order_does_not_forget_an_interrupt() -> None:
    gate = BoundaryGate()
    gate.arrive(5)
    gate.interrupt()
    assert gate.propose(order("a", 2)) == (False, 5)
    with pytest.raises(Interrupted):
        gate.arrive(6)


def test_interrupted_is_no_exception_that_user_code_would_swallow() -> None:
    assert not issubclass(Interrupted, Exception)


def test_a_hold_takes_the_order_that_is_made_for_it() -> None:
    gate = BoundaryGate()
    gate.will_hold(0)
    assert gate.propose(order("entry", 0, held=True)) == (True, 0)
    train = TrainThread(gate, lambda: gate.hold(0))
    assert train.waits()
    gate.confirm("entry", 0)
    assert train.result() == order("entry", 0, held=True)


def test_a_hold_takes_a_stop_that_names_its_step() -> None:
    gate = BoundaryGate()
    gate.arrive(9)
    gate.will_hold(10)
    assert gate.propose(order("stop", 10, stop=True)) == (True, 10)
    gate.confirm("stop", 10)
    assert gate.hold(10) == order("stop", 10, stop=True)


def test_a_passing_snapshot_does_not_let_a_rank_go_from_its_last_boundary() -> None:
    gate = BoundaryGate()
    gate.arrive(9)
    gate.will_hold(10)
    assert gate.propose(order("periodic", 10)) == (False, 10)
    gate.confirm("periodic", 10)
    train = TrainThread(gate, lambda: gate.hold(10))
    assert train.waits()
    gate.propose(order("final", 10, held=True))
    gate.confirm("final", 10)
    assert train.result() == order("final", 10, held=True)


def test_a_released_hold_goes_on_holding_and_takes_the_next_order() -> None:
    gate = BoundaryGate()
    gate.will_hold(0)
    gate.propose(order("a", 0, held=True))
    train = TrainThread(gate, lambda: gate.hold(0))
    assert train.waits()
    gate.release("a")
    assert train.waits()
    gate.propose(order("b", 0, held=True))
    gate.confirm("b", 0)
    assert train.result() == order("b", 0, held=True)


def test_a_hold_is_left_by_an_interrupt_and_is_no_hold_any_more() -> None:
    gate = BoundaryGate()
    gate.will_hold(4)
    train = TrainThread(gate, lambda: gate.hold(4))
    assert train.waits()
    gate.interrupt()
    assert train.result() == INTERRUPTED
    assert gate.propose(order("a", 4, held=True)) == (False, 4)


@pytest.mark.parametrize(
    ("act", "answer"),
    [(lambda gate: gate.release("a"), None), (lambda gate: gate.interrupt(), INTERRUPTED)],
    ids=["durable or given up", "interrupted"],
)
def test_a_rank_that_waits_for_a_durable_snapshot_goes_on_when_it_is(
    act: Callable[[BoundaryGate], Any], answer: Any
) -> None:
    gate = BoundaryGate()
    train = TrainThread(gate, lambda: gate.await_release("a"))
    assert train.waits()
    gate.release("b")
    assert train.waits()
    act(gate)
    assert train.result() == answer


def test_a_rank_does_not_wait_for_a_snapshot_that_was_over_before_it_asked() -> None:
    gate = BoundaryGate()
    gate.release("a")
    gate.await_release("a")


def test_a_proposal_that_comes_after_its_release_holds_nobody() -> None:
    gate = BoundaryGate()
    gate.release("late")
    assert gate.propose(order("late", 1)) == (False, 0)
    assert gate.arrive(1) is None


def test_a_late_proposal_does_not_take_the_place_of_the_order_that_followed() -> None:
    gate = BoundaryGate()
    gate.release("late")
    gate.propose(order("next", 2))
    gate.propose(order("late", 3))
    gate.confirm("next", 2)
    assert gate.arrive(2) == order("next", 2)


def test_the_model_of_the_simulations_answers_as_the_gate_does() -> None:
    """Random orders, in one thread: the gate is only asked where the model says that it would not wait."""
    waits = answers = 0
    for seed in range(3000):
        draw = random.Random(seed)
        gate, model = BoundaryGate(), GateModel()
        step, holding = 0, False
        for _ in range(draw.randint(1, 14)):
            attempt, act = draw.choice("abc"), draw.random()
            if act < 0.3:
                order_of = order(
                    attempt, step + draw.randint(-1, 2), stop=draw.random() < 0.3, held=draw.random() < 0.5
                )
                assert gate.propose(order_of) == model.propose(order_of), f"seed {seed}"
            elif act < 0.5:
                confirmed = attempt, step + draw.randint(0, 2)
                gate.confirm(*confirmed)
                model.confirm(*confirmed)
            elif act < 0.6:
                gate.release(attempt)
                model.release(attempt)
            elif act < 0.63:
                gate.interrupt()
                model.interrupt()
            elif act < 0.7 and not holding:
                step, holding = step + 1, True
                gate.will_hold(step)
                model.will_hold(step)
            else:
                ask = model.hold if holding else model.arrive
                at = step if holding else step + 1
                expected = ask(at)
                if expected == WAIT:
                    waits += 1
                    gate.step = model.step
                    break
                train = TrainThread(gate, partial(gate.hold if holding else gate.arrive, at))
                assert train.result() == expected, f"seed {seed}"
                answers += 1
                step, holding = at, False
    assert waits > 100
    assert answers > 3000


class Ranks:
    """Two ranks that do nothing but pass boundaries, and a controller that names some; for the stress test below."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.gates = [BoundaryGate() for _ in range(2)]
        self.met: list[dict[str, int]] = [{} for _ in self.gates]
        self.failed: list[BaseException] = []
        self.collective = threading.Barrier(2)
        self.news = threading.Semaphore(0)
        self.threads = [threading.Thread(target=self._train, args=(rank,), daemon=True) for rank in range(2)]

    def _train(self, rank: int) -> None:
        step = 0
        try:
            while True:
                self.collective.wait(DEADLINE_S)
                step += 1
                if (found := self.gates[rank].arrive(step)) is not None:
                    assert found.step == step
                    self.met[rank][found.attempt] = step
                    self.news.release()
        except Interrupted:
            assert step == self.gates[rank].step
            self.collective.abort()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            self.failed.append(error)

    def round(self, attempt: str) -> bool:
        """Name a boundary ahead of both until both accept; then confirm it, or give it up as a failed round does."""
        ahead = self.random.randint(0, 5)
        while True:
            step = max(gate.step for gate in self.gates) + ahead
            answers = [gate.propose(order(attempt, step)) for gate in self.gates]
            if all(accepted for accepted, _ in answers):
                break
            ahead = ahead * 2 + 1
        confirmed = self.random.random() < 0.8
        for gate in self.gates:
            if confirmed:
                gate.confirm(attempt, step)
            else:
                gate.release(attempt)
        return confirmed


@pytest.fixture
def threads_that_change_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("threads_that_change_often")
@pytest.mark.parametrize("seed", range(6))
def test_orders_race_with_arrivals_and_no_boundary_is_missed(seed: int) -> None:
    ranks = Ranks(seed)
    for thread in ranks.threads:
        thread.start()
    confirmed = []
    for number in range(600):
        attempt = f"a{number}"
        if ranks.round(attempt):
            confirmed.append(attempt)
            for _ in ranks.gates:
                assert ranks.news.acquire(timeout=DEADLINE_S), f"seed {seed}: a rank never met {attempt}"
    if seed % 2:
        for gate in ranks.gates:
            gate.interrupt()
    else:
        ranks.collective.abort()
    for thread in ranks.threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), f"seed {seed}: a rank waits for ever"
    assert not ranks.failed
    assert len(confirmed) > 400
    assert ranks.met[0] == ranks.met[1]
    assert list(ranks.met[0]) == confirmed


def test_a_doubted_step_waits_until_it_is_cleared_and_an_interrupt_ends_the_wait() -> None:
    gate = BoundaryGate()
    gate.clear(4)
    gate.await_clear(4)
    waiting = threading.Thread(target=lambda: outcome.append(_outcome(lambda: gate.await_clear(5))))
    outcome: list[str] = []
    waiting.start()
    gate.interrupt()
    waiting.join(10)
    assert outcome == ["interrupted"]


def _outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except Interrupted:
        return "interrupted"
    return "returned"
