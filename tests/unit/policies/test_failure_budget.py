"""Failures take tokens, committed training gives them back, and who fails often is left alone."""

from __future__ import annotations

import pytest

from policies.cooldown import FIRST_S, MOST_S, cooldown_s
from policies.domain import PolicyError
from policies.failure_budget import BUDGETS, Budget, jittered_backoff_s


def test_a_budget_bears_its_burst_and_one_more_for_the_training_that_was_committed() -> None:
    budget, spent = Budget(2, 100.0), 0.0
    for _ in range(2):
        spent, borne, _ = budget.spend(spent)
        assert borne
    spent, borne, why = budget.spend(spent)
    assert not borne
    assert why == "more than 2, one back for every 100 s of committed training"
    assert budget.spend(budget.refill(2.0, 99.0))[1] is False
    assert budget.spend(budget.refill(2.0, 100.0))[1] is True
    assert budget.refill(1.0, 1e9) == 0.0


def test_failures_every_half_minute_are_borne_for_ever_where_training_gets_on() -> None:
    budget, spent = BUDGETS["infrastructure"], 0.0
    for _ in range(1000):
        spent, borne, _ = budget.spend(spent)
        assert borne
        spent = budget.refill(spent, 25.0)


def test_a_budget_without_sense_is_refused() -> None:
    with pytest.raises(PolicyError):
        Budget(-1, 1.0)
    with pytest.raises(PolicyError):
        Budget(1, 0.0)


def test_the_first_failure_waits_for_nothing_and_the_next_ones_twice_as_long_each() -> None:
    assert jittered_backoff_s(1, 1.0, 60.0, seed=1) == 0.0
    for failures, middle in ((2, 1.0), (3, 2.0), (6, 16.0), (20, 60.0)):
        waits = [jittered_backoff_s(failures, 1.0, 60.0, seed) for seed in range(200)]
        assert min(waits) >= 0.5 * middle
        assert max(waits) <= 1.5 * middle
        assert max(waits) - min(waits) > 0.8 * middle, "spread"
        assert waits == [jittered_backoff_s(failures, 1.0, 60.0, seed) for seed in range(200)]


def test_a_node_that_failed_twice_in_a_row_is_left_alone_longer_each_time() -> None:
    assert cooldown_s([(0.0, "a")], "a", 0)[0] == 0.0
    assert cooldown_s([(0.0, "a"), (9.0, "b"), (10.0, "a")], "a", 0)[0] == 0.0
    twice = [(0.0, "b"), (5.0, "a"), (10.0, "a")]
    assert cooldown_s(twice, "a", 0) == (FIRST_S, "it failed twice in a row; left alone for 60 s")
    assert cooldown_s(twice, "a", 3)[0] == 8 * FIRST_S
    assert cooldown_s(twice, "a", 30)[0] == MOST_S


def test_a_node_with_most_of_the_failures_is_left_alone_though_others_failed_in_between() -> None:
    mixed = [(0.0, "a"), (1.0, "b"), (2.0, "a"), (3.0, "b"), (4.0, "a")]
    assert cooldown_s(mixed, "a", 0) == (FIRST_S, "3 of the last 5 failures were its own; left alone for 60 s")


def test_what_is_long_past_does_not_count() -> None:
    assert cooldown_s([(0.0, "a"), (4000.0, "a")], "a", 0)[0] == 0.0
