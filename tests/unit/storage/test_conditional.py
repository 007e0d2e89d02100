from __future__ import annotations

import pytest

from elastic.errors import CommitRefused, CommitUnknown
from elastic.storage.blob_store import Buffer, PutOutcome
from elastic.storage.conditional import COMMIT_TRIES, commit_marker
from elastic.storage.memory_blobs import MemoryBlobs


class Losing(MemoryBlobs):
    """Loses the first ``lost`` requests before they are done."""

    def __init__(self, lost: int) -> None:
        super().__init__()
        self.lost = lost

    def put_if_absent(self, key: str, data: Buffer) -> PutOutcome:
        if self.lost:
            self.lost -= 1
            return PutOutcome.UNKNOWN
        return super().put_if_absent(key, data)


def test_a_commit_is_there_on_return_and_may_be_repeated_by_a_successor() -> None:
    store = MemoryBlobs()
    commit_marker(store, "s/COMMITTED", b"w1 body", "w1")
    commit_marker(store, "s/COMMITTED", b"w1 body", "w1")
    assert store.get("s/COMMITTED") == b"w1 body"


def test_a_second_writer_is_refused_by_name_and_the_first_marker_stays() -> None:
    store = MemoryBlobs("refusing")
    commit_marker(store, "s/COMMITTED", b"w1", "w1")
    with pytest.raises(CommitRefused, match="memory://refusing/s/COMMITTED"):
        commit_marker(store, "s/COMMITTED", b"w2", "w2")
    assert store.get("s/COMMITTED") == b"w1"


def test_a_request_that_got_lost_on_its_way_is_sent_again() -> None:
    store = Losing(COMMIT_TRIES - 1)
    commit_marker(store, "k", b"w1", "w1")
    assert store.get("k") == b"w1"


def test_after_the_last_try_it_is_unknown() -> None:
    with pytest.raises(CommitUnknown):
        commit_marker(Losing(COMMIT_TRIES), "k", b"w1", "w1")


def test_a_marker_without_its_write_id_is_not_written() -> None:
    store = MemoryBlobs()
    with pytest.raises(ValueError, match="write id"):
        commit_marker(store, "k", b"{}", "w1")
    assert not store.exists("k")
