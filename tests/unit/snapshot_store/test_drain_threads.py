"""Threads that drain step back behind those that train."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from elastic.snapshot.drain_threads import DRAIN_NICE, drain_threads


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="single threads have a priority on Linux alone")
@pytest.mark.parametrize("nice", [0, DRAIN_NICE, 40])
def test_only_the_threads_of_the_pool_are_nicer(nice: int) -> None:
    before = niceness()
    with drain_threads(1, "drain", nice) as threads:
        assert threads.submit(niceness).result() == min(19, before + nice)
    assert niceness() == before
