from __future__ import annotations

import pickle

import pytest

from elastic.errors import CommitUnknown, StorageError
from elastic.faults import Fault, FaultPlan, Rule
from elastic.storage.blob_store import PutOutcome
from elastic.storage.conditional import commit_marker
from elastic.storage.faulty_blobs import FaultyBlobs
from elastic.storage.memory_blobs import MemoryBlobs


def faulty(*rules: Rule, atomic: bool = True) -> FaultyBlobs:
    return FaultyBlobs(MemoryBlobs(), FaultPlan(7, rules), atomic=atomic)


def test_without_rules_it_is_the_store_inside() -> None:
    store = faulty()
    store.check()
    store.put("a", b"1")
    store.put_parts("b", [b"2", b"3"])
    buffer = bytearray(1)
    store.read_into("b", 1, memoryview(buffer))
    assert (store.get("a"), bytes(buffer), store.size("b"), list(store.list(""))) == (b"1", b"3", 2, ["a", "b"])
    store.delete("a")
    assert not store.exists("a")


@pytest.mark.parametrize("operation", ["put", "put_parts", "put_if_absent"])
def test_a_failed_write_leaves_nothing_and_the_next_one_goes_through(operation: str) -> None:
    store = faulty(Rule(f"{operation}:k", Fault.FAIL))
    write = getattr(store, operation)
    body = [b"x"] if operation == "put_parts" else b"x"
    with pytest.raises(StorageError, match="seed=7"):
        write("k", body)
    assert list(store.list("")) == []
    write("k", body)
    assert store.get("k") == b"x"


def test_a_lost_answer_has_written() -> None:
    store = faulty(Rule("put*", Fault.LOST_ANSWER, times=None))
    with pytest.raises(StorageError):
        store.put("a", b"1")
    with pytest.raises(StorageError):
        store.put_parts("b", [b"2"])
    assert store.put_if_absent("c", b"3") is PutOutcome.UNKNOWN
    assert [store.get(key) for key in "abc"] == [b"1", b"2", b"3"]


def test_a_torn_write_never_shows_under_its_name_if_the_store_is_atomic() -> None:
    store = faulty(Rule("put:k", Fault.TORN), Rule("put_parts:k", Fault.TORN))
    with pytest.raises(StorageError):
        store.put("k", b"123456")
    with pytest.raises(StorageError):
        store.put_parts("k", [b"123", b"456"])
    assert not store.exists("k")
    assert [store.get(key) for key in store.list("")] == [b"123", b"123"]


def test_a_torn_write_shows_under_its_name_if_the_store_is_not() -> None:
    store = faulty(Rule("put_if_absent:k", Fault.TORN), atomic=False)
    with pytest.raises(StorageError):
        store.put_if_absent("k", b"123456")
    assert store.get("k") == b"123"


def test_a_full_store_says_so() -> None:
    store = faulty(Rule("put:k", Fault.FULL))
    with pytest.raises(StorageError, match="full"):
        store.put("k", b"1")
    assert not store.exists("k")


def test_a_corrupt_read_differs_in_one_bit_and_the_object_is_whole() -> None:
    store = faulty(Rule("get:k", Fault.CORRUPT), Rule("read_into:k", Fault.CORRUPT))
    body = bytes(100)
    store.put("k", body)
    buffer = bytearray(100)
    store.read_into("k", 0, memoryview(buffer))
    assert sum(byte.bit_count() for byte in store.get("k")) == 1
    assert sum(byte.bit_count() for byte in buffer) == 1
    assert store.get("k") == body


def test_a_store_that_is_gone_comes_back_with_what_it_had() -> None:
    store = faulty(Rule("put:b", Fault.GONE, lasts=2))
    store.put("a", b"1")
    for call in (lambda: store.put("b", b"2"), lambda: store.get("a"), lambda: store.list("")):
        with pytest.raises(StorageError, match="no answer"):
            call()
    assert list(store.list("")) == ["a"]
    store.vanish()
    for _ in range(3):
        with pytest.raises(StorageError):
            store.get("a")
    store.come_back()
    assert store.get("a") == b"1"


def test_a_rule_that_cannot_be_acted_out_is_a_mistake_of_the_test() -> None:
    with pytest.raises(ValueError, match="cannot strike"):
        faulty(Rule("get:*", Fault.TORN)).get("k")


def test_it_travels_to_another_process_with_its_plan() -> None:
    inner = MemoryBlobs.shared("faulty travels")
    copy = pickle.loads(pickle.dumps(FaultyBlobs(inner, FaultPlan(1, [Rule("put:k", Fault.FAIL)]))))
    with pytest.raises(StorageError):
        copy.put("k", b"1")
    assert copy.inner is inner


MARKER = b'{"attempt": "a1", "write_id": "w1"}'


def test_a_commit_whose_answer_is_lost_is_found_by_its_write_id() -> None:
    store = faulty(Rule("put_if_absent:*", Fault.LOST_ANSWER))
    commit_marker(store, "COMMITTED", MARKER, "w1")
    assert store.get("COMMITTED") == MARKER


def test_a_commit_that_cannot_be_read_back_is_unknown_and_may_be_repeated() -> None:
    store = faulty(Rule("put_if_absent:*", Fault.LOST_ANSWER), Rule("get:*", Fault.FAIL))
    with pytest.raises(CommitUnknown, match="COMMITTED"):
        commit_marker(store, "COMMITTED", MARKER, "w1")
    commit_marker(store, "COMMITTED", MARKER, "w1")
    assert store.get("COMMITTED") == MARKER


def test_a_commit_that_was_refused_by_the_store_is_a_storage_error_and_wrote_nothing() -> None:
    store = faulty(Rule("put_if_absent:*", Fault.FULL))
    with pytest.raises(StorageError, match="full"):
        commit_marker(store, "COMMITTED", MARKER, "w1")
    assert not store.exists("COMMITTED")
