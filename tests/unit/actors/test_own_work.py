"""What counts as a thread's own work, by the kernel's account of real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from actors.own_work import OwnWork
from elastic.progress import BOUNDARY, FIRST_STEP, STEP

LENGTH_S = 0.6


def sleeping_in(file: str) -> Callable[[], None]:
    """A function whose code lies in ``file``."""
    found: dict[str, Any] = {"sleep": time.sleep}
    exec(compile(f"def wait():\n    sleep({LENGTH_S})\n", file, "exec"), found)
    wait: Callable[[], None] = found["wait"]
    return wait


def spin() -> None:
    end = time.perf_counter() + LENGTH_S
    while time.perf_counter() < end:
        pass


def worked_s(work: Callable[[], None], phase: str = STEP) -> float:
    """What is counted of a thread that does ``work``."""
    thread = threading.Thread(target=work)
    thread.start()
    watch = OwnWork()
    watch.follow(thread)
    watch.look(phase)
    while thread.is_alive():
        time.sleep(LENGTH_S / 12)
        if thread.is_alive():
            watch.look(phase)
    return watch.worked_s


def test_to_run_is_work() -> None:
    assert worked_s(spin) > LENGTH_S / 2


def test_to_sleep_is_work_unless_it_is_in_a_collective() -> None:
    assert worked_s(sleeping_in("/home/user/train.py")) > LENGTH_S / 2
    assert worked_s(sleeping_in("/lib/torch/distributed/distributed_c10d.py")) < LENGTH_S / 4
    assert worked_s(sleeping_in("/lib/torch/autograd/graph.py")) < LENGTH_S / 4


@pytest.mark.parametrize("phase", [FIRST_STEP, "evaluation"])
def test_what_is_no_step_like_every_other_does_not_count(phase: str) -> None:
    assert worked_s(spin, phase) == 0


def test_to_wait_for_the_run_at_a_boundary_is_no_work() -> None:
    assert worked_s(sleeping_in("/home/user/train.py"), BOUNDARY) < LENGTH_S / 4
