"""Whatever is interrupted between any two writes of a commit, what is readable is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from support.made_snapshots import RUN, SnapshotMaker, assert_holds

from elastic.errors import CommitRefused, CommitUnknown, CorruptSnapshot, StorageError
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.blob_store import BlobStore, Buffer, PutOutcome
from elastic.storage.memory_blobs import MemoryBlobs


class Crash(Exception):
    """Stands for the end of the process."""


class CrashingBlobs(MemoryBlobs):
    """Counts writes; at write ``crash_at`` the process ends, before the write or after it, or in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.crash_at = -1
        self.when = "before"
        self.answer_lost = False

    def _turn(self, key: str, data: bytes, write: Callable[[], None]) -> None:
        self.writes += 1
        if self.writes - 1 == self.crash_at:
            if self.when == "after":
                write()
            if self.when == "torn" and not key.endswith("COMMITTED"):  # A conditional write is one step.
                super().put(key, data[: len(data) // 2])
            raise Crash(key)
        write()

    def put(self, key: str, data: Buffer) -> None:
        self._turn(key, bytes(data), lambda: super(CrashingBlobs, self).put(key, data))

    def put_parts(self, key: str, parts: Iterable[Buffer]) -> None:
        self.put(key, b"".join(bytes(part) for part in parts))

    def put_if_absent(self, key: str, data: Buffer) -> PutOutcome:
        outcomes: list[PutOutcome] = []
        self._turn(key, bytes(data), lambda: outcomes.append(super(CrashingBlobs, self).put_if_absent(key, data)))
        if self.answer_lost:
            self.answer_lost = False
            return PutOutcome.UNKNOWN
        return outcomes[0]

    def delete(self, key: str) -> None:
        self._turn(key, b"", lambda: super(CrashingBlobs, self).delete(key))


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[SnapshotMaker]:
    made = SnapshotMaker(tmp_path / "arena")
    yield made
    made.close()


def readable(store: BlobStore) -> list[int]:
    """Steps of all snapshots that a reader would choose, each loaded in full."""
    catalog = SnapshotCatalog(store, RUN)
    refs = catalog.list()
    assert catalog.quarantined == {}
    for ref in refs:
        catalog.load(ref)
    return [ref.step for ref in refs]


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_a_crash_between_any_two_writes_never_leaves_a_half_snapshot_readable(maker: SnapshotMaker, when: str) -> None:
    store = CrashingBlobs()
    old = maker.commit(store, 10)
    clean = CrashingBlobs()
    maker.commit(clean, 10)
    writes = clean.writes
    assert writes > maker.mesh.world_size + 4
    seen = set()
    for crash_at in range(writes):
        store.writes, store.crash_at, store.when = 0, crash_at, when
        try:
            maker.commit(store, 11 + crash_at, previous=old)
        except Crash as crash:
            key = str(crash)
        store.crash_at = -1
        steps = readable(store)
        last_two = key.endswith(("COMMITTED", "latest.json"))
        committed = (last_two and when == "after") or key.endswith("latest.json")
        assert (11 + crash_at in steps) == committed, key
        assert 10 in steps
        seen.add(key.rpartition("/")[2])
        if committed:
            for name in list(store.list(f"{RUN}/snapshots/{11 + crash_at:012d}")):
                MemoryBlobs.delete(store, name)
    assert {"objects.json", "tensors.parquet", "manifest.json", "latest.json", "n00000.chunks.parquet"} <= seen


def test_a_lost_answer_to_the_marker_is_read_back_and_recognised(maker: SnapshotMaker) -> None:
    store = CrashingBlobs()
    store.answer_lost = True
    assert maker.commit(store, 5).step == 5
    assert readable(store) == [5]


def test_a_second_writer_of_the_same_name_is_refused_and_the_first_stays(maker: SnapshotMaker) -> None:
    store = CrashingBlobs()
    first = maker.commit(store, 5)
    store.put(f"{RUN}/snapshots/000000000006-00000f4240-0002/COMMITTED", b'{"write_id":"somebody else"}')
    with pytest.raises(CommitRefused):
        maker.commit(store, 6)
    catalog = SnapshotCatalog(store, RUN)
    assert [ref.step for ref in catalog.list()] == [5]
    assert_holds(catalog.load(first), maker.values(5))


def test_a_store_that_is_gone_when_the_marker_is_read_back_makes_the_commit_unknown(maker: SnapshotMaker) -> None:
    class Gone(CrashingBlobs):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if key.endswith("COMMITTED"):
                raise StorageError("no answer", key)
            return super().get(key, start, length)

    store = Gone()
    store.answer_lost = True
    with pytest.raises(CommitUnknown):
        maker.commit(store, 5)


def test_a_failing_hint_does_not_fail_the_commit(maker: SnapshotMaker) -> None:
    class NoHint(CrashingBlobs):
        def put(self, key: str, data: Buffer) -> None:
            if key.endswith("latest.json"):
                raise StorageError("no permission", key)
            super().put(key, data)

    store = NoHint()
    maker.commit(store, 5)
    assert readable(store) == [5]


def test_latest_is_rebuilt_from_the_markers(maker: SnapshotMaker) -> None:
    store = CrashingBlobs()
    maker.commit(store, 5)
    newest = maker.commit(store, 7)
    store.delete(f"{RUN}/latest.json")
    assert SnapshotCatalog(store, RUN).rebuild_latest() == newest
    assert store.get(f"{RUN}/latest.json") == newest.to_bytes()


def _damage_pack(store: BlobStore, prefix: str) -> str:
    key = next(key for key in store.list(prefix) if key.endswith(".pack"))
    body = bytearray(store.get(key))
    body[3] ^= 1
    store.put(key, body)
    return key


def test_every_flipped_byte_of_every_small_file_is_found_when_the_snapshot_is_opened(maker: SnapshotMaker) -> None:
    store = CrashingBlobs()
    ref = maker.commit(store, 5)
    for key in list(store.list(ref.prefix)):
        if key.endswith(".pack"):
            continue
        good = store.get(key)
        for at in range(0, len(good), max(1, len(good) // 40)):
            bad = bytearray(good)
            bad[at] ^= 0x20
            store.put(key, bad)
            with pytest.raises(CorruptSnapshot):
                SnapshotCatalog(store, RUN).open(ref)
        store.put(key, good)
    SnapshotCatalog(store, RUN).open(ref)


def test_every_flipped_bit_of_a_pack_is_found_and_named(maker: SnapshotMaker) -> None:
    store = CrashingBlobs()
    ref = maker.commit(store, 5)
    catalog = SnapshotCatalog(store, RUN)
    table = catalog.open(ref).table
    for row in range(len(table)):
        key = ref.snapshots + table.packs[table.pack_id[row]]
        good = store.get(key)
        bad = bytearray(good)
        bad[int(table.byte_start[row])] ^= 1
        store.put(key, bad)
        with pytest.raises(CorruptSnapshot) as caught:
            catalog.load(ref)
        assert table.describe(row) in str(caught.value)
        store.put(key, good)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_missing_or_short_pack_sends_the_reader_to_the_older_snapshot(maker: SnapshotMaker, damage: str) -> None:
    store = CrashingBlobs()
    old = maker.commit(store, 5)
    new = maker.commit(store, 6)
    key = next(key for key in store.list(new.prefix) if key.endswith(".pack"))
    body = store.get(key)
    store.delete(key)
    if damage == "short":
        store.put(key, body[:-40])
    catalog = SnapshotCatalog(store, RUN)
    found = catalog.newest_good()
    assert found is not None
    assert found[0] == old
    assert list(catalog.quarantined) == [new.directory]
    assert key in catalog.quarantined[new.directory]


def test_a_quarantined_snapshot_is_not_chosen(maker: SnapshotMaker) -> None:
    store = CrashingBlobs()
    old, new = maker.commit(store, 5), maker.commit(store, 6)
    found = SnapshotCatalog(store, RUN, [new.directory]).newest_good()
    assert found is not None
    assert found[0] == old
    assert SnapshotCatalog(store, RUN, [new.directory, old.directory]).newest_good() is None


def test_a_directory_without_a_marker_is_nothing_whatever_its_name_says(maker: SnapshotMaker) -> None:
    store = CrashingBlobs()
    ref = maker.commit(store, 5)
    for key in list(store.list(ref.prefix)):
        store.put(key.replace("000000000005", "000000000099"), store.get(key))
    assert readable(store) == [5]
