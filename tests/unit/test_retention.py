from __future__ import annotations

import pytest

from elastic.errors import ConfigError
from elastic.retention import Candidate, Retention, best, every_hours, every_steps, everything, keep_last, parse, pinned

FOUND = [
    Candidate(f"s{step}", step, hour * 3600.0, step == 30, {"loss": loss} if loss else {})
    for step, hour, loss in [
        (10, 0.1, 5.0),
        (20, 0.6, 3.0),
        (30, 1.2, 4.0),
        (45, 1.3, 0.0),
        (50, 3.0, 2.0),
        (61, 3.5, 2.5),
    ]
]


def kept(rule: object) -> list[int]:
    return [c.step for c, keep in zip(FOUND, rule(FOUND)) if keep]  # type: ignore[operator]


def test_each_rule_keeps_what_it_says() -> None:
    assert kept(keep_last(2)) == [50, 61]
    assert kept(keep_last(99)) == [10, 20, 30, 45, 50, 61]
    assert kept(every_steps(20)) == [10, 20, 45, 61]
    assert kept(every_hours(1)) == [10, 30, 50]
    assert kept(pinned) == [30]
    assert kept(best(2, "loss")) == [50, 61]
    assert kept(best(1, "loss", largest=True)) == [10]
    assert kept(best(3, "accuracy")) == []
    assert kept(everything) == [10, 20, 30, 45, 50, 61]


def test_rules_combine_and_say_what_they_are() -> None:
    rule = keep_last(1) | every_hours(1) | best(1, "loss")
    assert kept(rule) == [10, 30, 50, 61]
    assert str(rule) == "keep_last(1) | every_hours(1) | best(1, 'loss')"


def test_rules_of_nothing_are_refused() -> None:
    for make in (keep_last, every_steps, every_hours):
        with pytest.raises(ConfigError):
            make(0)


def test_an_empty_list_keeps_nothing() -> None:
    for rule in (keep_last(1), every_steps(1), every_hours(1), pinned, best(1, "loss")):
        assert rule([]) == []


@pytest.mark.parametrize(
    "rule",
    [
        keep_last(2),
        keep_last(1) | every_steps(20),
        every_hours(0.5) | best(2, "loss") | pinned,
        best(1, "it's | loss", largest=True),
        everything,
    ],
    ids=str,
)
def test_a_rule_is_read_back_from_its_own_text(rule: Retention) -> None:
    again = parse(str(rule))
    assert str(again) == str(rule)
    assert again(FOUND) == rule(FOUND)


def test_a_number_keeps_the_newest() -> None:
    assert parse(3)(FOUND) == parse("3")(FOUND) == keep_last(3)(FOUND)


@pytest.mark.parametrize(
    "text",
    [
        "", "newest(3)", "keep_last()", "keep_last('a')", "keep_last(-1)", "keep_last(3) & pinned", "3 | 'a'", "True",
        "best(2, loss)", "__import__('os').remove('x')", "keep_last(open('x'))", "every_steps(n=3, m=4)", "2.5",
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused_in_one_sentence_and_never_run(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert "\n" not in str(refused.value)
