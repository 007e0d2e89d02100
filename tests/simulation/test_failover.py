"""Thousands of lives of a run whose controller is killed between any two of its commands, each from one seed.

``Run(SEED, trouble=with_kills(SEED)).play()`` shows a history again.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from support.made_up_run import Run, Trouble
from support.made_up_world import POINTS, any_trouble

HISTORIES = 2000


def with_kills(seed: int) -> Trouble:
    """Anything that can go wrong, and the controller with it; in some histories the journal is not always written."""
    return replace(any_trouble(random.Random(seed)), controller_kills=4, journal_fails=0.2 if seed % 5 == 0 else 0.0)


@cache
def histories() -> tuple[Run, ...]:
    return tuple(Run(seed, trouble=with_kills(seed)).play() for seed in range(HISTORIES))


def test_wherever_the_controller_is_killed_its_successor_brings_the_run_to_an_end() -> None:
    runs = histories()
    assert all(run.ended for run in runs)
    assert sum(run.adoptions for run in runs) > HISTORIES
    assert sum(run.ended is not None and run.ended.status == "failed" for run in runs) < HISTORIES // 4


def test_controllers_are_killed_at_every_kind_of_command() -> None:
    places = [place for run in histories() for place in run.killed_at]
    assert not [kind for kind in POINTS if not any(kind in place for place in places)]


def test_a_killed_controller_alone_costs_neither_an_incident_nor_a_step() -> None:
    for seed in range(400):
        run = Run(seed, trouble=Trouble(controller_kills=3), nodes=4).play()
        assert run.ended is not None
        assert run.ended.status == "finished", f"seed {seed}: {run.ended}"
        slow = run.slow > 10  # calls that take minutes are given up on by deadlines
        assert slow or not run.incidents, f"seed {seed}: {run.incidents}"
