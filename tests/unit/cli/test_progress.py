from __future__ import annotations

from typing import Any

import pytest

from elastic.cli.progress import PlainProgress, line, news

INCIDENT = {
    "kind": "node",
    "rung": "shrink",
    "why": "gone",
    "old_world_size": 4,
    "new_world_size": 3,
    "steps_lost": 0,
    "rto_s": 1.25,
    "split": {
        "detect_s": 0.9,
        "place_s": 0.0,
        "decide_s": 0.05,
        "form_s": 0.01,
        "restore_s": 0.2,
        "first_step_s": 0.09,
    },
}


def status(**changes: Any) -> dict[str, Any]:
    return {
        "run": "r",
        "phase": "running",
        "generation": 1,
        "world_size": 4,
        "target": 4,
        "mesh": "dp4",
        "step": 12,
        "metrics": {"loss": 2.5},
        "samples_per_s": 812.4,
        "snapshot_node": {"step": 10},
        "snapshot_remote_step": 8,
        "uploading": True,
        "next_snapshot_s": 1.5,
        "incidents": [],
        "alarms": [],
        "journal_lag": "",
    } | changes


def test_one_line_holds_all_that_a_person_asks_for() -> None:
    assert line(status()) == (
        "step 12  loss 2.5  samples/s 812.4  generation 1  ranks 4 of 4  snapshot in memory step 10  "
        "durable step 8 (uploading)  next snapshot in 1.5 s"
    )


def test_nothing_is_told_twice() -> None:
    now = status(incidents=[INCIDENT], alarms=["slow"], journal_lag="full")
    assert news(None, now)
    assert news(now, now) == []


def test_an_incident_is_told_with_where_its_time_went() -> None:
    (told,) = news(status(), status(incidents=[INCIDENT]))
    assert told == (
        "node lost, shrink: 4 → 3 ranks, going on after 1.25 s "
        "(detect 900 ms, decide 50 ms, form 10 ms, restore 200 ms, first step 90 ms); 0 steps lost"
    )


def test_a_new_generation_is_told_with_its_size() -> None:
    (told,) = news(status(), status(generation=2, world_size=3, mesh="dp3"))
    assert told == "generation 2: 3 ranks (dp3) at step 12"


@pytest.mark.parametrize(
    ("old", "new", "fresh"),
    [
        (["a"], ["a", "b"], ["b"]),
        (["a", "b", "c"], ["b", "c", "d"], ["d"]),
        ([], ["a"], ["a"]),
        (["a"], ["b"], ["b"]),
    ],
)
def test_alarms_are_told_once_though_the_oldest_are_forgotten(old: list[str], new: list[str], fresh: list[str]) -> None:
    assert news(status(alarms=old), status(alarms=new)) == [f"alarm: {alarm}" for alarm in fresh]


def test_plain_progress_keeps_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainProgress() as display:
        display.show(status())
        display.show(status())
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 2
