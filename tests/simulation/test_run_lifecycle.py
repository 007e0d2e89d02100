"""Thousands of lives of a run, each from one seed: whatever happens in whatever order, what must hold holds.

A history that breaks something prints its seed: ``Run(SEED).play()`` shows it again. For a longer hunt call
``histories`` by hand with other seeds.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

from support.made_up_run import Run, Trouble

HISTORIES = 2000


@cache
def histories(first: int, last: int) -> tuple[Run, ...]:
    return tuple(Run(seed).play() for seed in range(first, last))


def test_whatever_happens_the_run_comes_to_an_end_and_nothing_uncommitted_is_restored() -> None:
    ended = Counter(run.ended.status for run in histories(0, HISTORIES) if run.ended)
    assert sum(ended.values()) == HISTORIES
    assert set(ended) == {"finished", "stopped", "failed"}
    assert ended["failed"] < HISTORIES // 5


def test_the_histories_reach_every_command_and_every_way_to_fail() -> None:
    seen: set[str] = set()
    kinds: set[str] = set()
    for run in histories(0, HISTORIES):
        seen |= run.reached
        kinds |= {run.ended.kind} if run.ended else set()
    assert seen == {
        "StartStore", "StartMember", "KillMember", "BeginGeneration", "Interrupt", "Probe", "StartRound", "CancelRound",
        "EndRoundBeyond", "CloseIncident", "CloseNotice", "StartSalvage", "Warn", "Quarantine", "MakeDurable", "EndRun",
    }  # fmt: skip
    assert kinds == {"", "user", "refused", "cluster", "snapshot"}


def test_histories_restore_and_close_incidents_again_and_again() -> None:
    runs = histories(0, HISTORIES)
    assert sum(len(run.incidents) for run in runs) > HISTORIES // 3
    assert sum(len(run.restores) for run in runs) > HISTORIES


def test_without_trouble_every_run_finishes_in_its_first_generation_or_grows() -> None:
    for seed in range(200):
        run = Run(seed, trouble=Trouble(), nodes=4).play()
        assert run.ended is not None
        assert run.ended.status == "finished", f"seed {seed}: {run.ended}"
        assert not run.incidents, f"seed {seed}"


def test_the_same_seed_is_the_same_history() -> None:
    once, twice = Run(7).play(), Run(7).play()
    assert once.machine.story == twice.machine.story
    assert once.machine.state == twice.machine.state
