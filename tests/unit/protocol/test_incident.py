"""An incident tells where the time went, what it cost, and the gravest cause."""

from __future__ import annotations

import itertools

import pytest

from elastic.protocol.incident import Incident


def opened(kind: str = "error", *, why: str = "connection reset", step: int = 7, collateral: bool = False) -> Incident:
    return Incident.opened(kind=kind, generation=3, world_size=4, at=10.0, why=why, step=step, collateral=collateral)


def test_the_parts_add_up_to_the_whole() -> None:
    incident = opened().settled(10.25).begun(10.5, 4, 3).formed(11.0, 0.25).formed(11.25, 0.375)
    incident = incident.entered(12.0, 5).entered(11.75, 5).first_step(12.5)
    assert incident.split() == {
        "detect_s": 0.25, "salvage_s": 0.0, "place_s": 0.25, "decide_s": 0.375, "form_s": 0.375, "restore_s": 0.75,
        "first_step_s": 0.5,
    }  # fmt: skip
    assert sum(incident.split().values()) == incident.rto_s == 2.5


def test_the_parts_add_up_whatever_was_never_told_or_told_twice() -> None:
    tellings = [
        lambda i: i.settled(11.0), lambda i: i.begun(12.0, 4, 3), lambda i: i.formed(13.0, 0.5),
        lambda i: i.entered(14.0, 5), lambda i: i.settled(15.0).begun(15.5, 5, 2),
    ]  # fmt: skip
    for count in range(len(tellings) + 1):
        for some in itertools.combinations(tellings, count):
            incident = opened()
            for tell in some:
                incident = tell(incident)
            incident = incident.first_step(16.0)
            assert sum(incident.split().values()) == pytest.approx(incident.rto_s) == 6.0
            assert min(incident.split().values()) >= 0


def test_a_failure_while_it_forms_goes_on_in_the_same_incident() -> None:
    incident = opened("rank").settled(11.0).begun(11.5, 4, 3).formed(12.0, 0.2)
    incident = incident.also("node", 7, "node b is gone").settled(13.0).begun(13.5, 5, 2)
    assert (incident.opened_at, incident.new_generation, incident.new_world_size) == (10.0, 5, 2)
    assert incident.formed_at == -1.0
    assert (incident.kind, incident.why) == ("node", "node b is gone")


def test_the_gravest_kind_explains_and_a_lesser_one_does_not() -> None:
    assert opened("rank", why="it died").also("error", 9, "connection reset").why == "it died"
    graver = opened(why="connection reset").also("rank", 9, "it died")
    assert (graver.kind, graver.why) == ("rank", "it died")
    assert opened("rank", why="the first").also("rank", 9, "the second").why == "the first"


def test_an_error_of_its_own_explains_the_errors_of_its_peers_in_either_order() -> None:
    own_last = opened(why="connection reset", collateral=True).also("error", 7, "ValueError: no")
    assert (own_last.why, own_last.collateral) == ("ValueError: no", False)
    own_first = opened(why="ValueError: no").also("error", 7, "connection reset", collateral=True)
    assert (own_first.why, own_first.collateral) == ("ValueError: no", False)


def test_steps_lost_count_from_the_furthest_rank_to_the_step_that_was_restored() -> None:
    incident = opened(step=-1).reached(9).reached(8).settled(11).begun(11, 4, 4).entered(12, 5)
    assert incident.steps_lost == 4
    assert opened().entered(12, 7).steps_lost == 0
    assert opened().steps_lost == 0


@pytest.mark.parametrize(
    ("kind", "world_size", "rung"),
    [("rank", 3, "shrink"), ("error", 3, "shrink"), ("rank", 4, "replace"), ("node", 4, "replace"),
     ("hang", 5, "replace"), ("error", 4, "re-enter")],
)  # fmt: skip
def test_the_rung_that_was_taken(kind: str, world_size: int, rung: str) -> None:
    assert opened(kind).begun(11.0, 4, world_size).rung == rung
