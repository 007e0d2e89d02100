from __future__ import annotations

import pickle
import threading

import pytest

from elastic.faults import Fault, FaultPlan, Rule


def struck(plan: FaultPlan, points: list[str]) -> list[int]:
    return [index for index, point in enumerate(points) if plan.at(point)]


def test_a_rule_strikes_only_where_its_glob_matches() -> None:
    plan = FaultPlan(1, [Rule("put:*/COMMITTED", Fault.FAIL, times=None)])
    assert struck(plan, ["put:a/b/COMMITTED", "get:a/COMMITTED", "put:a/x", "put:a/COMMITTED"]) == [0, 3]


def test_spared_visits_come_first_and_strikes_are_counted() -> None:
    plan = FaultPlan(1, [Rule("p", Fault.FAIL, after=2, times=3)])
    assert struck(plan, ["p"] * 10) == [2, 3, 4]


def test_the_same_seed_gives_the_same_faults_and_another_gives_others() -> None:
    points = [f"put:{index % 7}" for index in range(200)]
    rules = [Rule("put:*", Fault.FAIL, probability=0.3, times=None)]
    first = struck(FaultPlan(17, rules), points)
    assert struck(FaultPlan(17, rules), points) == first
    assert struck(FaultPlan(18, rules), points) != first
    assert 30 < len(first) < 90


def test_what_strikes_does_not_depend_on_which_thread_came_first() -> None:
    rules = [Rule("put:*", Fault.FAIL, probability=0.4, times=None)]
    points = [f"put:{index}" for index in range(8)]

    def by_threads() -> set[tuple[str, int]]:
        plan, found = FaultPlan(5, rules), set()
        gate = threading.Barrier(len(points))

        def visit(point: str) -> None:
            gate.wait()
            found.update((point, turn) for turn in range(50) if plan.at(point))

        threads = [threading.Thread(target=visit, args=(point,)) for point in points]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    plan = FaultPlan(5, rules)
    assert by_threads() == {(point, turn) for point in points for turn in range(50) if plan.at(point)}


def test_the_first_matching_rule_strikes_and_the_others_still_count() -> None:
    first, second = Rule("p", Fault.FAIL), Rule("p", Fault.CRASH, after=1)
    plan = FaultPlan(1, [first, second])
    assert [plan.at("p"), plan.at("p"), plan.at("p")] == [first, second, None]


def test_it_is_told_what_fired_and_with_which_seed() -> None:
    rule = Rule("p", Fault.TORN)
    plan = FaultPlan(99, [rule])
    plan.at("other")
    plan.at("p")
    assert plan.fired == (("p", rule),)
    assert "seed=99" in repr(plan)


def test_a_plan_travels_to_another_process_as_new() -> None:
    plan = FaultPlan(3, [Rule("p", Fault.FAIL)])
    plan.at("p")
    copy = pickle.loads(pickle.dumps(plan))
    assert repr(copy) == repr(plan)
    assert copy.at("p")


@pytest.mark.parametrize("seed", range(20))
def test_a_fraction_is_below_one_and_not_negative(seed: int) -> None:
    assert 0 <= FaultPlan(seed).fraction("x") < 1
