"""Who is waited for gets the whole of the time, also when the controller itself was held up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from actors.inbox import Inbox
from elastic.clock import now
from elastic.protocol.run_events import Late, Tick


def taken(*deadlines: float | None, events: tuple[Any, ...] = (), held_up_s: float = 0.0) -> list[Any]:
    """What is handed out for deadlines in so many seconds from now; ``events`` are queued before the first."""

    async def take() -> list[Any]:
        inbox = Inbox()
        for event in events:
            inbox.put(event)
        time.sleep(held_up_s)
        return [await inbox.next(None if due is None else now() + due) for due in deadlines]

    return asyncio.run(take())


def test_what_is_queued_goes_before_a_deadline_that_has_passed() -> None:
    first, second, third = taken(-5.0, -5.0, -5.0, events=("departed", "lost"))
    assert (first, second) == ("departed", "lost")
    assert isinstance(third, Tick)


def test_a_deadline_is_told_when_it_is_there() -> None:
    started = now()
    (tick,) = taken(0.05)
    assert isinstance(tick, Tick)
    assert 0.05 <= tick.at - started < 5.0


def test_time_in_which_an_event_was_acted_on_is_told_before_the_deadline() -> None:
    late, event, tick = taken(-1.0, -1.0, -1.0, events=("departed",), held_up_s=0.4)
    assert isinstance(late, Late)
    assert 0.4 <= late.by_s < 2.0
    assert event == "departed"
    assert isinstance(tick, Tick)


def test_without_a_deadline_nothing_is_told_of_it() -> None:
    assert taken(None, events=("departed",), held_up_s=0.4) == ["departed"]


def test_time_in_which_the_loop_stood_still_is_told_with_the_next_event() -> None:
    async def take() -> list[Any]:
        inbox = Inbox()
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, time.sleep, 0.6)
        loop.call_later(0.1, inbox.put, "departed")
        return [await inbox.next(now() + 0.2), await inbox.next(now() - 1.0), await inbox.next(now() - 1.0)]

    told = asyncio.run(take())
    assert told.count("departed") == 1
    (late,) = [event for event in told if isinstance(event, Late)]
    assert late.by_s == pytest.approx(0.45, abs=0.3)
