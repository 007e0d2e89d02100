"""Who is to blame when ranks stand still, and when nobody is."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from elastic.protocol.hangs import (
    NodePulse,
    RankPulse,
    odd_one_out,
    still_moving,
    suspicion,
    train_stack,
    waits_for_peers,
)

SILENCE_S = 5.0
ALLREDUCE = "all_reduce (/lib/torch/distributed/distributed_c10d.py:2950)"
BACKWARD = "_engine_run_backward (/lib/torch/autograd/graph.py:829)"


def rank(member: str, step: int = 7, phase: str = "step", idle_s: float = 31.0, **fields: Any) -> RankPulse:
    return RankPulse(member, phase, step, idle_s, fields.pop("limit_s", 30.0), fields.pop("silent_s", 0.1), **fields)


def node(*over: RankPulse, moving_step: int | None = None, name: str = "n0") -> NodePulse:
    return NodePulse(name, "10.0.0.1", over, moving_step)


def test_a_run_in_which_everybody_moves_is_not_suspected() -> None:
    assert suspicion([node(moving_step=7), node(moving_step=8)], SILENCE_S) is None


def test_nobody_is_judged_while_one_may_still_come() -> None:
    waiting = node(rank("a", 8), rank("b", 8), rank("c", 8))
    assert suspicion([waiting, node(moving_step=7)], SILENCE_S) is None, "it evaluates, and all wait for it"
    assert suspicion([waiting, node(moving_step=8)], SILENCE_S) is None
    assert suspicion([waiting, node(moving_step=-1)], SILENCE_S) is None, "it has not begun"


def test_who_has_finished_fewer_steps_than_all_others_is_the_culprit() -> None:
    found = suspicion([node(rank("a", 8), rank("b", 7)), node(rank("c", 8))], SILENCE_S)
    assert found is not None
    assert (found.culprit, [r.member for r in found.standing]) == ("b", ["a", "b", "c"])
    assert "after step 7" in found.why


def test_who_stands_while_the_others_have_gone_on_without_it_is_the_culprit() -> None:
    found = suspicion([node(rank("a", 7)), node(moving_step=9), node(moving_step=9)], SILENCE_S)
    assert found is not None
    assert found.culprit == "a"


def test_a_stopped_process_is_found_before_any_step_is_late() -> None:
    stopped = rank("b", 7, idle_s=6.0, silent_s=5.5, stopped=True)
    found = suspicion([node(stopped, moving_step=7)], SILENCE_S)
    assert found is not None
    assert found.culprit == "b"
    assert "stopped" in found.why
    paused = rank("b", 7, idle_s=6.0, silent_s=4.0, stopped=True)
    assert suspicion([node(paused, moving_step=7)], SILENCE_S) is None, "a debugger may look for a moment"


def test_a_process_that_is_silent_but_not_stopped_has_the_time_of_its_step() -> None:
    busy = rank("b", 7, idle_s=20.0, silent_s=19.0)
    assert suspicion([node(busy, moving_step=7)], SILENCE_S) is None
    found = suspicion([node(rank("a"), rank("b", silent_s=19.0), rank("c"))], SILENCE_S)
    assert found is not None
    assert found.culprit == "b"


def test_the_one_in_another_phase_is_the_culprit_once_its_own_limit_is_over() -> None:
    late = rank("c", 7, "evaluation", idle_s=70.0, limit_s=60.0)
    found = suspicion([node(rank("a"), rank("b"), late)], SILENCE_S)
    assert found is not None
    assert found.culprit == "c"
    assert "evaluation" in found.why
    assert suspicion([node(rank("a"), rank("b"), moving_step=7)], SILENCE_S) is None


def test_an_exempt_phase_is_never_over() -> None:
    assert not rank("a", phase="evaluation", idle_s=1e9, limit_s=inf).over


def test_where_all_stand_in_the_same_step_only_stacks_can_tell() -> None:
    found = suspicion([node(rank("a"), rank("b")), node(rank("c"))], SILENCE_S)
    assert found is not None
    assert (found.culprit, found.why) == ("", "")


def test_half_of_the_ranks_behind_the_other_half_is_no_majority_against_them() -> None:
    found = suspicion([node(rank("a", 7), rank("b", 7), rank("c", 8))], SILENCE_S)
    assert found is not None
    assert found.culprit == ""


DUMP = """Process 12: ray::Rank
Python v3.11.7 (/usr/bin/python3.11)

Thread 12 (idle): "MainThread"
    poll (/app/outbox.py:30)
    <module> (/app/worker.py:9)
Thread 0x7F (active): "train"
    lock_up (/home/me/train.py:41)
    train (/home/me/train.py:77)
    Thread.run (/lib/threading.py:982)
Thread 14 (idle): "heartbeat"
    _beat (/app/page.py:80)
"""


def test_the_stack_of_the_train_thread_is_found_in_a_dump() -> None:
    assert train_stack(DUMP) == (
        "lock_up (/home/me/train.py:41)", "train (/home/me/train.py:77)", "Thread.run (/lib/threading.py:982)",
    )  # fmt: skip
    assert train_stack("") == train_stack('Process 12: x\nThread 12 (idle): "MainThread"\n    f (x.py:1)\n') == ()


@pytest.mark.parametrize(("frame", "waits"), [(ALLREDUCE, True), (BACKWARD, True), ("f (/me/train.py:3)", False)])
def test_a_collective_is_known_by_its_innermost_frame(frame: str, waits: bool) -> None:
    assert waits_for_peers([frame, "train (/me/train.py:77)"]) is waits
    assert not waits_for_peers([])


def test_the_one_outside_of_the_collective_is_the_odd_one() -> None:
    stacks = {"a": [ALLREDUCE], "b": ["lock_up (/me/train.py:41)"], "c": [BACKWARD]}
    member, why = odd_one_out(stacks)
    assert member == "b"
    assert "lock_up (/me/train.py:41)" in why
    assert odd_one_out({"a": [ALLREDUCE], "b": ["f (x.py:1)"]})[0] == "b", "two ranks are enough for that"


def test_the_one_in_another_call_than_all_others_is_the_odd_one() -> None:
    wait = "wait (/me/pipeline.py:3)"
    assert odd_one_out({"a": [wait], "b": [wait], "c": ["f (x.py:1)"]})[0] == "c"
    assert odd_one_out({"a": [wait], "b": ["f (x.py:1)"]}) == ("", "")
    assert odd_one_out({"a": [ALLREDUCE], "b": [ALLREDUCE]}) == ("", "")
    assert odd_one_out({"a": [ALLREDUCE], "b": []}) == ("", "")
    assert odd_one_out({"a": [ALLREDUCE], "b": [BACKWARD], "c": [BACKWARD]})[0] == "a"


def test_who_works_outside_of_a_collective_still_moves() -> None:
    here, there = ["f (x.py:1)"], ["g (x.py:9)"]
    assert still_moving({"a": here, "b": [ALLREDUCE]}, {"a": there, "b": [BACKWARD]}, {}) == ["a"]
    assert still_moving({"a": here}, {"a": here}, {"a": 0.9}) == ["a"]
    assert still_moving({"a": here, "b": [ALLREDUCE]}, {"a": here, "b": [ALLREDUCE]}, {"a": 0.1, "b": 1.0}) == []
    assert still_moving({}, {"a": []}, {"a": 1.0}) == []
