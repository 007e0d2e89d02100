"""A probe is over when its actor answers, when its time is over, or when the raylet of its node refuses connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from actors.raylets import Raylet, refuses
from actors.watch import answers
from elastic.clock import now

LONG_S = 60.0
"""Longer than a test may take: what ends before has not waited for it."""


class Probe:
    """What a call of an actor returns, as far as a probe sees it."""

    def __init__(self, *values: Any) -> None:
        self._future: Future[Any] = Future()
        for value in values:
            self._future.set_result(value)

    def future(self) -> Future[Any]:
        return self._future


async def forever() -> bool:
    await asyncio.sleep(LONG_S)
    return False


async def at_once(found: bool) -> bool:
    return found


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        yield server


def place_of(server: socket.socket) -> Raylet:
    host, port = server.getsockname()
    return host, port


def test_a_raylet_that_died_refuses_and_one_that_lives_does_not(listening: socket.socket) -> None:
    raylet = place_of(listening)
    assert not asyncio.run(refuses(raylet, LONG_S))
    listening.close()
    assert asyncio.run(refuses(raylet, LONG_S))


def test_a_raylet_of_which_nothing_comes_back_is_not_taken_for_dead(listening: socket.socket) -> None:
    with ExitStack() as open_ones:
        for _ in range(2):  # the queue is full: the kernel drops what comes now, as a network does that is cut
            client = open_ones.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(place_of(listening))
        assert not asyncio.run(refuses(place_of(listening), 0.2))


def test_an_actor_that_answers_is_alive_although_nothing_is_heard_of_its_raylet() -> None:
    assert asyncio.run(answers(lambda: Probe(True), LONG_S, forever()))
    assert asyncio.run(answers(lambda: Probe(True), LONG_S, at_once(False)))


def test_an_actor_on_a_dead_node_is_not_waited_for() -> None:
    began = now()
    assert not asyncio.run(answers(Probe, LONG_S, at_once(True)))
    assert now() - began < LONG_S / 2


def test_an_actor_that_does_not_answer_in_time_is_dead_although_its_raylet_lives() -> None:
    assert not asyncio.run(answers(Probe, 0.05, at_once(False)))
    assert not asyncio.run(answers(Probe, 0.05, forever()))
