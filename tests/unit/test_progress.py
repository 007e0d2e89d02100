"""Marks of the train thread, and the limits that are learned from them."""

from __future__ import annotations

from math import inf

import pytest

from elastic import progress
from elastic.progress import BOUNDARY, BUILDING, FIRST_STEP, LOADING, STEP, PhaseLimits, Progress


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 100.0
        monkeypatch.setattr(progress, "now", lambda: self.at)

    def lasts(self, marks: Progress, phase: str, seconds: float) -> None:
        marks.enter(phase, 0)
        self.at += seconds
        marks.enter(BOUNDARY, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_mark_says_phase_step_time_and_limit(clock: Clock) -> None:
    marks = Progress(PhaseLimits(step_s=7.0, loading_s=9.0))
    marks.enter(STEP, 3)
    assert marks.mark == (STEP, 3, 100.0, 7.0)
    marks.enter(LOADING, 4)
    assert marks.mark == (LOADING, 4, 100.0, 9.0)
    for phase in (BUILDING, BOUNDARY):
        marks.enter(phase, 4)
        assert marks.mark[3] == inf
    marks.enter_with("evaluation", 4, 60.0)
    assert marks.mark == ("evaluation", 4, 100.0, 60.0)


def test_the_limit_of_a_step_is_ten_times_the_longest_and_at_least_half_a_minute(clock: Clock) -> None:
    marks = Progress()
    assert marks.limit_s(STEP) == 30.0
    clock.lasts(marks, STEP, 2.0)
    assert marks.limit_s(STEP) == 30.0
    clock.lasts(marks, STEP, 8.0)
    clock.lasts(marks, STEP, 1.0)
    assert marks.limit_s(STEP) == 80.0


def test_a_slow_first_step_says_nothing_of_the_others_and_all_of_the_next_first(clock: Clock) -> None:
    marks = Progress(PhaseLimits(first_step_s=600.0))
    assert marks.limit_s(FIRST_STEP) == 600.0
    clock.lasts(marks, FIRST_STEP, 20.0)
    assert (marks.limit_s(STEP), marks.limit_s(FIRST_STEP)) == (30.0, 200.0)
    clock.lasts(marks, FIRST_STEP, 500.0)
    assert marks.limit_s(FIRST_STEP) == 600.0


def test_what_is_configured_is_not_learned(clock: Clock) -> None:
    marks = Progress(PhaseLimits(step_s=5.0, first_step_s=50.0))
    clock.lasts(marks, STEP, 4.0)
    clock.lasts(marks, FIRST_STEP, 4.0)
    assert (marks.limit_s(STEP), marks.limit_s(FIRST_STEP)) == (5.0, 50.0)


def test_loading_and_other_phases_teach_nothing_of_steps(clock: Clock) -> None:
    marks = Progress()
    clock.lasts(marks, LOADING, 500.0)
    clock.lasts(marks, "evaluation", 500.0)
    assert marks.limit_s(STEP) == 30.0
