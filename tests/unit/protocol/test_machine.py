"""The one shape of every protocol: an event without an entry raises, and nothing happens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from elastic.errors import InternalError
from elastic.protocol.machine import Machine, ignore


@dataclass(frozen=True)
class State:
    phase: str = "open"
    count: int = 0


@dataclass(frozen=True)
class Add:
    by: int


@dataclass(frozen=True)
class Close:
    pass


def _add(state: State, event: Add) -> tuple[State, tuple[Any, ...]]:
    return replace(state, count=state.count + event.by), (f"added {event.by}",)


def _close(state: State, event: Close) -> tuple[State, tuple[Any, ...]]:
    return replace(state, phase="closed"), ()


TABLE = {("open", Add): _add, ("open", Close): _close, ("closed", Close): ignore}


def test_an_event_advances_the_state_and_answers_with_commands() -> None:
    machine = Machine("counter", TABLE, State())
    assert machine.handle(Add(2)) == ("added 2",)
    assert machine.state == State("open", 2)


def test_an_event_without_an_entry_raises_with_the_story_and_nothing_happens() -> None:
    machine = Machine("counter", TABLE, State())
    machine.handle(Add(2))
    machine.handle(Close())
    before = machine.state
    with pytest.raises(InternalError, match="counter: Add is not expected in phase closed") as caught:
        machine.handle(Add(1))
    assert machine.state is before
    assert [line.split(" → ")[0] for line in caught.value.story] == [
        "open × Add(by=2)", "open × Close()", "closed × Add(by=1)",
    ]  # fmt: skip


def test_a_handler_that_raises_leaves_the_state_as_it_was() -> None:
    def fail(state: State, event: Add) -> tuple[State, tuple[Any, ...]]:
        raise ValueError("no")

    machine = Machine("counter", {("open", Add): fail}, State())
    with pytest.raises(ValueError, match="no"):
        machine.handle(Add(1))
    assert machine.state == State()
    assert machine.story == ()


def test_an_ignored_event_changes_nothing() -> None:
    machine = Machine("counter", TABLE, State("closed"))
    assert machine.handle(Close()) == ()
    assert machine.state == State("closed")


def test_the_story_keeps_only_the_last_events() -> None:
    machine = Machine("counter", TABLE, State())
    for number in range(100):
        machine.handle(Add(number))
    assert len(machine.story) == Machine.STORY_LENGTH
    assert "Add(by=99)" in machine.story[-1]
