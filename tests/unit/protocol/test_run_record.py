from __future__ import annotations

import json
import math
from dataclasses import fields, replace

from elastic.mesh import Mesh
from elastic.protocol.incident import Incident
from elastic.protocol.membership import Evacuation, Member, Node, Notice
from elastic.protocol.run_record import ASKED_OF_THE_LIVING, record_of, state_of
from elastic.protocol.run_state import RUNNING, Limits, RunState
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot, RestoreOrder

LIMITS = Limits({"dp": -1, "tp": 2}, 2, 4)
INCIDENT = Incident.opened(kind="node", generation=2, world_size=4, at=10.0, why="gone", step=7)
STATE = RunState(
    LIMITS,
    phase=RUNNING,
    generation=3,
    target=4,
    nodes={"n1": Node("n1", 2, "ready", "rack", store_failures=1)},
    members={"m0001": Member("m0001", "n1", "active")},
    members_made=5,
    start_failures=1,
    ranks=("m0001", "m0002"),
    mesh=Mesh((("dp", 1), ("tp", 2))),
    restoring=RestoreOrder(6, NodeSnapshot("a", 6, {0: ("n1", "n2"), 1: ()}, True), RemoteSnapshot("b", 4), "newest"),
    unreadable={"a": 1},
    incident=INCIDENT,
    failures_without_progress=2,
    user_errors=((("ValueError", 3), ("KeyError", 4)), (("E", 5),)),
    avoid=frozenset({"n1", "n2"}),
    stop_asked=True,
    remotes=(RemoteSnapshot("b", 4, earlier=True),),
    notices=(Notice("n1", "drain", "told", 3.0), Notice("n2", "sigterm", "told", 4.0, 29.0, frozenset({"m0002"}))),
    evacuation=Evacuation("drain", ("n1",), 2, 3.0),
)


def test_what_the_journal_holds_of_a_state_comes_back_whole_through_json() -> None:
    assert state_of(json.loads(json.dumps(record_of(STATE))), LIMITS) == STATE


def test_every_field_of_the_state_is_written_or_asked_of_the_living() -> None:
    names = {field.name for field in fields(RunState)}
    assert names >= ASKED_OF_THE_LIVING
    assert set(record_of(STATE)) == names - ASKED_OF_THE_LIVING


def test_times_of_an_incident_move_to_the_new_clock_and_what_has_not_happened_stays_so() -> None:
    moved = state_of(record_of(STATE), LIMITS, shift_s=5.0)
    assert moved.incident == replace(INCIDENT, opened_at=15.0)
    assert [(notice.at, notice.deadline) for notice in moved.notices] == [(8.0, math.inf), (9.0, 34.0)]
    assert moved.evacuation is not None
    assert (moved.evacuation.opened_at, moved.evacuation.out_at) == (8.0, -1.0)


def test_a_record_of_a_version_with_other_fields_is_read_as_far_as_it_is_known() -> None:
    record = {**record_of(STATE), "of_tomorrow": 1}
    del record["avoid"]
    assert state_of(record, LIMITS) == replace(STATE, avoid=frozenset())
