"""Who is told as slow, and who is not: from what ranks have worked, window after window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.protocol.stragglers import WINDOWS, RankWork, Straggler, Watch, look

WINDOW_S = 10.0
STEP_S = 0.5


def told(
    windows: Sequence[Mapping[str, float]],
    *,
    groups: Sequence[Sequence[str]] = (),
    step_s: float = STEP_S,
    generations: Sequence[int] = (),
    factor: float = 1.5,
) -> list[tuple[Straggler, ...] | None]:
    """What each window ends with. ``windows``: for each of them the seconds that each member works in a step."""
    members = list(windows[0])
    placed = [[(members.index(name), name) for name in group] for group in groups or [members]]
    watch, at, step, worked = Watch(), 0.0, 0, dict.fromkeys(members, 0.0)
    answers: list[tuple[Straggler, ...] | None] = []
    for index, work in enumerate([dict.fromkeys(members, 0.0), *windows]):
        generation = generations[index] if generations else 1
        if index:
            at, step = at + WINDOW_S, step + round(WINDOW_S / step_s)
            worked = {name: worked[name] + work[name] * round(WINDOW_S / step_s) for name in members}
        readings = {name: RankWork(name, generation, step, worked[name], at) for name in members}
        watch, answer = look(watch, at, generation, placed, readings, factor=factor, window_s=WINDOW_S)
        answers.append(answer)
    return answers[1:]


def names(answer: tuple[Straggler, ...] | None) -> list[str]:
    assert answer is not None
    return [straggler.member for straggler in answer]


EVEN = {"a": 0.2, "b": 0.21, "c": 0.19, "d": 0.2}


def test_a_rank_that_works_twice_as_long_is_told_after_three_windows_with_what_it_costs() -> None:
    answers = told([{**EVEN, "c": 0.42}] * 4)
    assert [names(answer) for answer in answers] == [[], [], ["c"], ["c"]]
    (slow,) = answers[2] or ()
    assert (slow.rank, slow.from_step, slow.to_step, slow.windows) == (2, 0, 60, 3)
    assert (slow.worked_s, slow.peers_s, slow.step_s) == (pytest.approx(0.42), pytest.approx(0.2), STEP_S)
    assert slow.costs_s == pytest.approx(0.22)


def test_two_slow_ranks_of_five_are_told_and_three_of_five_are_what_is_usual() -> None:
    five = {**EVEN, "e": 0.2}
    assert names(told([{**five, "b": 0.44, "e": 0.46}] * 3)[-1]) == ["b", "e"]
    assert names(told([{**five, "a": 0.45, "b": 0.44, "e": 0.46}] * 3)[-1]) == []


def test_of_two_ranks_the_slow_one_is_told_and_a_single_one_is_never() -> None:
    assert names(told([{"a": 0.4, "b": 0.2}] * 3)[-1]) == ["a"]
    assert names(told([{"a": 0.4}] * 3)[-1]) == []


def test_a_window_without_it_begins_the_count_again() -> None:
    slow, even = {**EVEN, "a": 0.4}, EVEN
    assert [names(a) for a in told([slow, slow, even, slow, slow, slow])] == [[], [], [], [], [], ["a"]]


def test_an_excess_that_costs_little_of_the_step_is_not_told() -> None:
    tiny = {"a": 0.002, "b": 0.002, "c": 0.02}
    assert names(told([tiny] * 3)[-1]) == [], "a tenth of the step is what counts"
    assert names(told([{name: 10 * s for name, s in tiny.items()}] * 3)[-1]) == ["c"]


def test_ranks_that_differ_anyway_are_not_told() -> None:
    wide = {"a": 0.1, "b": 0.15, "c": 0.25, "d": 0.3, "e": 0.45}
    assert names(told([wide] * 3)[-1]) == []


def test_stages_of_a_pipeline_are_compared_with_their_own_kind() -> None:
    stages = {"a": 0.1, "b": 0.1, "c": 0.3, "d": 0.3}
    assert names(told([stages] * 3)[-1]) == ["c", "d"], "if all had the same to do"
    assert names(told([stages] * 3, groups=[["a", "b"], ["c", "d"]])[-1]) == []
    assert names(told([{**stages, "b": 0.2}] * 3, groups=[["a", "b"], ["c", "d"]])[-1]) == ["b"]


def test_a_window_has_at_least_ten_steps() -> None:
    long = {**EVEN, "a": 1.9}
    answers = told([long] * 15, step_s=2.0)
    assert [answer is not None for answer in answers] == [index % 2 == 1 for index in range(15)]
    assert names(answers[5]) == ["a"]


def test_a_new_generation_begins_afresh() -> None:
    slow = {**EVEN, "a": 0.4}
    assert [a and names(a) for a in told([slow] * 5, generations=[1, 1, 1, 2, 2, 2])] == [(), (), None, (), ()]


def test_nothing_is_said_while_a_rank_has_not_spoken_of_this_generation() -> None:
    readings = {"a": RankWork("a", 2, 5, 1.0, 0.0), "b": RankWork("b", 1, 900, 50.0, 0.0)}
    watch, answer = look(Watch(), 0.0, 2, [[(0, "a"), (1, "b")]], readings, factor=1.5, window_s=1.0)
    assert (watch, answer) == (Watch(), None)


@settings(derandomize=True, deadline=None)
@given(
    ranks=st.integers(2, 24),
    base_s=st.floats(0.01, 10.0),
    noise=st.lists(st.floats(-0.08, 0.08), min_size=24, max_size=24),
    slow=st.integers(0, 23),
    times=st.floats(2.0, 50.0),
)
def test_whoever_is_slow_among_ranks_with_small_differences_is_the_one_that_is_named(
    ranks: int, base_s: float, noise: list[float], slow: int, times: float
) -> None:
    even = {f"m{rank:02d}": base_s * (1 + noise[rank]) for rank in range(ranks)}
    step_s = base_s * times * 1.1
    culprit = f"m{slow % ranks:02d}"
    windows = [even, {**even, culprit: base_s * times}]
    quiet, loud = ([work] * WINDOWS for work in windows)
    last = lambda answers: next(a for a in reversed(answers) if a is not None)  # noqa: E731
    scale = WINDOW_S / (100 * step_s)
    told_quiet = told([{n: s * scale for n, s in w.items()} for w in quiet], step_s=WINDOW_S / 100)
    told_loud = told([{n: s * scale for n, s in w.items()} for w in loud], step_s=WINDOW_S / 100)
    assert names(last(told_quiet)) == []
    assert names(last(told_loud)) == [culprit]
