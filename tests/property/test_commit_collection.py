"""Retention and collection, stopped anywhere: what is readable stays whole, and running again finishes the work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.made_snapshots import RUN, SnapshotMaker, assert_holds

from elastic.retention import best, every_steps, keep_last
from elastic.snapshot.collect import collect, pin, unpin
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.object_names import attempt_prefix, new_snapshot_id
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.blob_store import Buffer
from elastic.storage.memory_blobs import MemoryBlobs

NOW = 2_000_000.0


class Crash(Exception):
    pass


class CrashingBlobs(MemoryBlobs):
    """Stops before the n-th change."""

    crash_at = -1
    changes = 0

    def _change(self) -> None:
        self.changes += 1
        if self.changes - 1 == self.crash_at:
            raise Crash

    def put(self, key: str, data: Buffer) -> None:
        self._change()
        super().put(key, data)

    def delete(self, key: str) -> None:
        self._change()
        super().delete(key)


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[SnapshotMaker]:
    made = SnapshotMaker(tmp_path / "arena")
    yield made
    made.close()


def chain(maker: SnapshotMaker, store: MemoryBlobs, n: int = 4) -> list[SnapshotRef]:
    """Snapshots that each refer to the first, one bias changed in each."""
    refs: list[SnapshotRef] = []
    for step in range(n):
        values = maker.values(0)
        values["linear.bias"] = maker.values(step)["linear.bias"]
        refs.append(maker.commit(store, step, values, previous=refs[-1] if refs else None))
    return refs


def assert_all_readable(maker: SnapshotMaker, store: MemoryBlobs) -> list[int]:
    catalog = SnapshotCatalog(store, RUN)
    refs = catalog.list()
    for ref in refs:
        values = maker.values(0)
        values["linear.bias"] = maker.values(ref.step)["linear.bias"]
        assert_holds(catalog.load(ref), values)
    return [ref.step for ref in refs]


def test_a_collection_stopped_at_any_change_leaves_every_snapshot_whole_and_can_be_run_again(
    maker: SnapshotMaker,
) -> None:
    model = CrashingBlobs()
    chain(maker, model)
    contents = dict(model._blobs)
    model.changes = 0
    collect(model, RUN, keep_last(1), now_s=NOW, grace_s=0)
    total, final = model.changes, dict(model._blobs)
    assert total > 10
    for crash_at in range(total):
        store = CrashingBlobs()
        store._blobs = dict(contents)
        store.crash_at = crash_at
        with pytest.raises(Crash):
            collect(store, RUN, keep_last(1), now_s=NOW, grace_s=0)
        store.crash_at = -1
        assert 3 in assert_all_readable(maker, store)
        collect(store, RUN, keep_last(1), now_s=NOW + 1, grace_s=0)
        assert {key for key in store._blobs if "DROPPED" not in key} == {key for key in final if "DROPPED" not in key}
        assert assert_all_readable(maker, store) == [3]


def test_a_dry_run_changes_nothing_and_says_what_would_be_done(maker: SnapshotMaker) -> None:
    store = MemoryBlobs()
    refs = chain(maker, store)
    before = dict(store._blobs)
    planned = collect(store, RUN, keep_last(2), now_s=NOW, grace_s=0, dry_run=True)
    assert store._blobs == before
    assert planned.drop == tuple(refs[:2])
    done = collect(store, RUN, keep_last(2), now_s=NOW, grace_s=0)
    assert set(done.delete) == set(planned.delete)
    assert done.keep == tuple(refs[2:])


def test_who_collects_again_and_again_reads_a_note_once_and_forgets_it_with_its_file(maker: SnapshotMaker) -> None:
    class Counting(MemoryBlobs):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            read.append(key.rpartition("/")[2])
            return super().get(key, start, length)

    read: list[str] = []
    store, known = Counting(), dict[str, bytes]()
    chain(maker, store)
    for again in range(3):
        read.clear()
        collect(store, RUN, keep_last(2), now_s=NOW, grace_s=100, read_before=known)
        notes = [name for name in read if name in ("COMMITTED", "DROPPED", "manifest.json")]
        assert sorted(notes) == [["COMMITTED"] * 4 + ["manifest.json"] * 4, ["DROPPED"] * 2, []][again]
    collect(store, RUN, keep_last(1), now_s=NOW + 200, grace_s=100, read_before=known)
    collect(store, RUN, keep_last(1), now_s=NOW + 400, grace_s=100, read_before=known)
    assert set(known) == {key for key in store.list("") if key.endswith(("COMMITTED", "DROPPED", "manifest.json"))}


def test_the_grace_time_counts_from_the_drop_that_was_carried_out(maker: SnapshotMaker) -> None:
    store, known = MemoryBlobs(), dict[str, bytes]()
    refs = chain(maker, store, 3)
    oldest = f"{refs[0].snapshots}{refs[0].directory}"
    store.put(f"{oldest}/DROPPED", json.dumps({"dropped_at_s": NOW}).encode())  # stopped before the marker went
    pin(store, refs[0])
    collect(store, RUN, keep_last(3), now_s=NOW + 10, grace_s=100, read_before=known)
    unpin(store, refs[0])
    collect(store, RUN, keep_last(1), now_s=NOW + 200, grace_s=100, read_before=known)
    collect(store, RUN, keep_last(1), now_s=NOW + 210, grace_s=100, read_before=known)
    assert any(key.endswith("manifest.json") for key in store.list(oldest))
    collect(store, RUN, keep_last(1), now_s=NOW + 310, grace_s=100, read_before=known)
    assert not any(key.endswith("manifest.json") for key in store.list(oldest))


def test_files_outlive_their_snapshot_by_the_grace_time(maker: SnapshotMaker) -> None:
    store = MemoryBlobs()
    old = maker.commit(store, 1)
    maker.commit(store, 2)
    collect(store, RUN, keep_last(1), now_s=NOW, grace_s=600)
    assert [ref.step for ref in SnapshotCatalog(store, RUN).list()] == [2]
    assert_holds(SnapshotCatalog(store, RUN).load(old), maker.values(1))  # A reader that had opened it finishes.
    collect(store, RUN, keep_last(1), now_s=NOW + 599, grace_s=600)
    assert list(store.list(old.prefix))
    collect(store, RUN, keep_last(1), now_s=NOW + 600, grace_s=600)
    assert not [key for key in store.list(f"{RUN}/snapshots/") if old.directory in key]


def test_an_attempt_in_flight_and_what_it_refers_to_are_never_touched(maker: SnapshotMaker) -> None:
    store = MemoryBlobs()
    old = maker.commit(store, 1)
    maker.commit(store, 2)
    attempt, reports = maker.take(3)
    index, files = maker.upload(store, 3, attempt, 0.0, old)
    flying = f"{3:012d}-{index.snapshot_id}"
    before = dict(store._blobs)
    collect(store, RUN, keep_last(1), now_s=NOW, grace_s=0, in_flight=[old.directory, flying], generation=99)
    assert store._blobs == before
    assert files
    assert reports


def test_leftovers_go_when_they_are_old_and_of_an_older_generation(maker: SnapshotMaker) -> None:
    store = MemoryBlobs()
    maker.commit(store, 1)

    def leftover(generation: int, opened_at_s: float) -> str:
        prefix = attempt_prefix(RUN, 9, new_snapshot_id(opened_at_s, "x"), f"g{generation:05d}-000001")
        store.put(f"{prefix}/r00000.pack", b"left")
        return f"{prefix}/r00000.pack"

    old = leftover(1, NOW - 7200)
    young = leftover(1, NOW - 60)
    current = leftover(2, NOW - 7201)
    nameless = f"{RUN}/snapshots/000000000009-who/knows/r00000.pack"
    store.put(nameless, b"left")
    report = collect(store, RUN, keep_last(1), now_s=NOW, grace_s=3600, generation=2)
    assert report.delete == (old,)
    assert all(store.exists(key) for key in (young, current, nameless))
    assert_holds(SnapshotCatalog(store, RUN).load(SnapshotCatalog(store, RUN).list()[0]), maker.values(1))


def test_a_failed_attempt_beside_a_committed_one_is_a_leftover(maker: SnapshotMaker) -> None:
    store = MemoryBlobs()
    ref = maker.commit(store, 1)
    stray = f"{ref.snapshots}{ref.directory}/g00000-000009/r00000.pack"
    store.put(stray, b"left")
    assert collect(store, RUN, keep_last(1), now_s=NOW, generation=1).delete == (stray,)
    assert_holds(SnapshotCatalog(store, RUN).load(ref), maker.values(1))


def test_never_fewer_than_one_restorable_snapshot(maker: SnapshotMaker) -> None:
    store = MemoryBlobs()
    good, bad = maker.commit(store, 1), maker.commit(store, 2)
    table = next(key for key in store.list(bad.prefix) if key.endswith(".parquet"))
    store.put(table, b"damaged")
    report = collect(store, RUN, keep_last(1), now_s=NOW, grace_s=0)
    assert report.keep == (good, bad)
    assert report.reasons[good.directory] == "the newest"
    # TRAPS 15: a rule that chooses an old one does not cost the newest.
    other = MemoryBlobs()
    refs = [maker.commit(other, step, metrics={"loss": float(step)}) for step in (1, 2, 3)]
    assert collect(other, RUN, best(1, "loss"), now_s=NOW, grace_s=0).keep == (refs[0], refs[2])


def test_a_manifest_that_cannot_be_read_stops_the_sweep_and_is_said(maker: SnapshotMaker) -> None:
    store = MemoryBlobs()
    old, mid, _ = (maker.commit(store, step) for step in (1, 2, 3))
    store.put(f"{mid.prefix}/manifest.json", b"{}")
    report = collect(store, RUN, keep_last(1), now_s=NOW, grace_s=0)
    assert report.delete == ()
    assert mid.directory in report.blocked[0]
    assert [key for key in store.list(f"{RUN}/snapshots/") if old.directory in key and key.endswith(".pack")]


def test_a_pinned_snapshot_stays_until_it_is_unpinned(maker: SnapshotMaker) -> None:
    store = MemoryBlobs()
    old, new = maker.commit(store, 1), maker.commit(store, 2)
    pin(store, old)
    assert collect(store, RUN, keep_last(1), now_s=NOW, grace_s=0).keep == (old, new)
    unpin(store, old)
    assert collect(store, RUN, keep_last(1), now_s=NOW, grace_s=0).keep == (new,)


def test_an_interrupted_drop_of_a_snapshot_that_is_then_kept_does_no_harm(maker: SnapshotMaker) -> None:
    store = MemoryBlobs()
    old = maker.commit(store, 1)
    maker.commit(store, 2)
    store.put(f"{old.snapshots}{old.directory}/DROPPED", json.dumps({"dropped_at_s": 0}).encode())
    collect(store, RUN, keep_last(2) | every_steps(1), now_s=NOW, grace_s=0)
    assert_holds(SnapshotCatalog(store, RUN).load(old), maker.values(1))


def test_an_empty_run_has_nothing_to_collect() -> None:
    report = collect(MemoryBlobs(), RUN, keep_last(1), now_s=NOW)
    assert (report.keep, report.drop, report.delete) == ((), (), ())
