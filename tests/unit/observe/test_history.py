from __future__ import annotations

from typing import Any

import pytest

from elastic.errors import ClusterError, CorruptSnapshot
from elastic.journal import encode, segment_key
from elastic.observe.history import journal_records, read_history, runs_in
from elastic.storage.memory_blobs import MemoryBlobs


def store_of(*segments: tuple[str, int, list[dict[str, Any]]]) -> MemoryBlobs:
    store = MemoryBlobs()
    store.put("r/run.json", b"{}")
    for controller, sequence, records in segments:
        store.put(segment_key("r", controller, sequence), encode(records))
    return store


def begun(at: float, generation: int, world_size: int) -> dict[str, Any]:
    return {"kind": "begun", "t": at, "generation": generation, "world_size": world_size, "mesh": f"dp{world_size}"}


FIRST = ("c100-zz", 0, [begun(100.0, 1, 4), {"kind": "metrics", "t": 101.0, "rows": [[1, 0.1, {"loss": 3.0}]]}])
SECOND = (
    "c200-aa",
    0,
    [
        begun(200.0, 2, 3),
        {"kind": "incident", "t": 201.0, "rto_s": 1.5},
        {"kind": "alarm", "t": 202.0, "reason": "the disk is full"},
        {"kind": "metrics", "t": 203.0, "rows": [[8, 0.1, {"loss": 2.5}], [9, 0.1, {"loss": 2.0}]]},
    ],
)
END = ("c200-aa", 1, [{"kind": "ended", "t": 204.0, "status": "stopped", "reason": "stopped as asked"}])


def test_a_run_is_what_its_last_controller_wrote_of_it() -> None:
    found = read_history(store_of(SECOND, END, FIRST), "r")
    assert (found.starts, found.generation, found.world_size, found.mesh) == (2, 2, 3, "dp3")
    assert (found.step, found.metrics) == (9, {"loss": 2.0})
    assert found.incidents == ({"rto_s": 1.5, "controller": "c200-aa"},)
    assert found.alarms == ("the disk is full",)
    assert (found.ended, found.reason, found.last_word_at_s) == ("stopped", "stopped as asked", 204.0)


def test_a_run_that_began_again_after_it_ended_has_not_ended() -> None:
    again = ("c300-bb", 0, [begun(300.0, 3, 2)])
    assert read_history(store_of(SECOND, END, again), "r").ended == ""


def test_records_come_by_the_time_of_their_controller_not_by_its_name() -> None:
    controllers = [record["controller"] for record in journal_records(store_of(SECOND, FIRST), "r")]
    assert controllers == sorted(controllers)
    late = store_of(("c99-zz", 0, [begun(99.0, 1, 1)]), ("c100-aa", 0, [begun(100.0, 2, 1)]))
    assert [record["generation"] for record in journal_records(late, "r")] == [1, 2]


def test_a_damaged_segment_is_named_and_the_rest_is_read() -> None:
    store = store_of(SECOND)
    store.put(segment_key("r", "c300-bb", 0), b"no record\n")
    found = read_history(store, "r")
    assert found.generation == 2
    assert len(found.unreadable) == 1
    assert "c300-bb-00000000.jsonl, line 1" in found.unreadable[0]
    with pytest.raises(CorruptSnapshot):
        list(journal_records(store, "r"))


def test_a_name_without_a_run_is_refused_with_the_place() -> None:
    with pytest.raises(ClusterError, match=r"there is no run 'other' in .*; check the name and the storage"):
        read_history(store_of(FIRST), "other")


def test_runs_are_listed_by_their_first_file() -> None:
    store = store_of()
    store.put("a/run.json", b"{}")
    store.put("not-a-run/other.json", b"{}")
    assert runs_in(store) == ["a", "r"]
