"""A node that the controller does not ask any more ends its own ranks, and only then leaves the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import REPOSITORY

from actors.node_watch import NodeWatch
from actors.progress_page import read_pages
from elastic.clock import now

LIMIT_S = 0.75
LONG_S = 60.0
RANK = """
import sys, threading
from actors.progress_page import PageWriter
from elastic.progress import Progress
PageWriter(sys.argv[1], "m0000", Progress())
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps the page of a rank."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_ranks_live_while_the_controller_asks_and_are_ended_when_it_does_not(
    rank: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    left = threading.Event()
    found: list[int | None] = []

    def leave() -> None:
        found.append(rank.wait(LONG_S))
        left.set()

    watch = NodeWatch("node", "198.18.0.2", str(tmp_path), LIMIT_S, leave)
    began = now()
    while now() - began < 3 * LIMIT_S:
        pulse = watch.pulse(1, ("m0000",))
        assert not left.wait(LIMIT_S / 50)
    assert pulse.moving_step == -1, "it is about to begin generation 1"
    assert left.wait(LONG_S)
    assert found == [-signal.SIGKILL]
    assert read_pages(str(tmp_path)) == []
