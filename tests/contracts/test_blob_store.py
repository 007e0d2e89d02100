"""What every blob store promises, tried on each kind."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic.errors import CommitRefused, StorageError
from elastic.storage.blob_store import BlobStore, PutOutcome
from elastic.storage.conditional import commit_marker

MIB = 1 << 20
OUTSIDE = ["", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "./a", "a//b", "a/"]
OUTSIDE += ["a\\b", "a\0b", "a\nb", "a/.part-1", "\ud800"]
UNUSUAL = ["ключ/日本/é", "a b/c+d", "50%/x?versionId=3#y", "[x]*{y}", "e\u0301", "~a/$b&c=d;e@f", "dot./..x/.y"]
READS: tuple[Callable[[BlobStore, str], object], ...] = (
    lambda store, key: store.get(key),
    lambda store, key: store.get(key, 0, 1),
    lambda store, key: store.read_into(key, 0, memoryview(bytearray(1))),
    lambda store, key: store.size(key),
)
WRITES: tuple[Callable[[BlobStore, str], object], ...] = (
    lambda store, key: store.put(key, b"1"),
    lambda store, key: store.put_if_absent(key, b"1"),
    lambda store, key: store.put_parts(key, [b"1"]),
    lambda store, key: store.delete(key),
)


def at_once(count: int, call: Callable[[int], object]) -> list[object]:
    """The results of ``call(0..count-1)`` from as many threads, all let go at the same moment."""
    gate = threading.Barrier(count)

    def waiting(index: int) -> object:
        gate.wait()
        return call(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(waiting, range(count)))


class TestWriting:
    @pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 300], ids=len)
    def test_what_was_put_is_read_back(self, store: BlobStore, body: bytes) -> None:
        store.put("a/b/c.bin", body)
        assert store.get("a/b/c.bin") == body
        assert store.size("a/b/c.bin") == len(body)
        assert store.exists("a/b/c.bin")

    def test_any_buffer_is_taken(self, store: BlobStore) -> None:
        numbers = memoryview(bytearray(64)).cast("q")
        numbers[3] = 7
        for key, buffer in (("array", bytearray(b"abc")), ("view", memoryview(b"abc")[1:]), ("numbers", numbers)):
            store.put(key, buffer)
            assert store.get(key) == bytes(buffer)
            assert store.put_if_absent(key + ".new", buffer) is PutOutcome.WRITTEN
            assert store.get(key + ".new") == bytes(buffer)

    def test_put_replaces(self, store: BlobStore) -> None:
        store.put("latest.json", b"a longer first version")
        store.put("latest.json", b"second")
        assert store.get("latest.json") == b"second"
        assert list(store.list("latest")) == ["latest.json"]

    def test_a_replacement_is_seen_whole_or_not_at_all(self, store: BlobStore) -> None:
        versions = [bytes([letter]) * (64 * 1024 + letter) for letter in b"abcd"]
        store.put("hint", versions[0])
        done = threading.Event()

        def read() -> set[bytes]:
            seen = {store.get("hint")}
            while not done.is_set():
                seen.add(store.get("hint"))
            return seen

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            for turn in range(24):
                store.put("hint", versions[turn % 4])
            done.set()
            for reader in readers:
                assert reader.result() <= set(versions)

    def test_parts_are_joined_in_order_and_their_buffer_may_be_reused(self, store: BlobStore) -> None:
        block = bytearray(MIB + 1)

        def parts() -> Iterator[memoryview]:
            for letter in range(20):
                block[:] = bytes([letter]) * len(block)
                yield memoryview(block)

        store.put_parts("big.pack", parts())
        assert store.size("big.pack") == 20 * len(block)
        for letter in range(20):
            assert store.get("big.pack", letter * len(block), len(block)) == bytes([letter]) * len(block)
        assert store.get("big.pack")[-3:] == bytes([19]) * 3

    def test_no_parts_make_an_empty_object(self, store: BlobStore) -> None:
        store.put_parts("empty", iter(()))
        assert store.get("empty") == b""

    def test_parts_that_fail_midway_leave_no_object_and_their_error_comes_through(self, store: BlobStore) -> None:
        def parts() -> Iterator[bytes]:
            yield b"x" * (20 * MIB)
            raise OSError("the source is gone")

        with pytest.raises(OSError, match="the source is gone"):
            store.put_parts("half.pack", parts())
        assert not store.exists("half.pack")
        assert list(store.list("")) == []

    def test_a_big_object_in_one_piece(self, store: BlobStore) -> None:
        body = bytes(range(251)) * (40 * MIB // 251)
        store.put("big", body)
        assert store.size("big") == len(body)
        assert store.get("big") == body

    @pytest.mark.parametrize("size", [0, 10, 9 * MIB])
    def test_a_file_is_stored_as_it_is(self, store: BlobStore, tmp_path: Path, size: int) -> None:
        source = tmp_path / "source"
        source.write_bytes(bytes(range(256)) * (size // 256) + b"!" * (size % 256))
        store.put_file("copy", source)
        assert store.get("copy") == source.read_bytes()


class TestOneWriterWins:
    def test_a_second_conditional_write_is_refused_and_changes_nothing(self, store: BlobStore) -> None:
        assert store.put_if_absent("s/COMMITTED", b"first") is PutOutcome.WRITTEN
        assert store.put_if_absent("s/COMMITTED", b"second") is PutOutcome.REFUSED
        assert store.get("s/COMMITTED") == b"first"
        assert list(store.list("")) == ["s/COMMITTED"]

    def test_of_sixteen_at_once_exactly_one_is_told_that_it_wrote(self, store: BlobStore) -> None:
        outcomes = at_once(16, lambda index: store.put_if_absent("s/COMMITTED", b"writer %d" % index))
        assert outcomes.count(PutOutcome.WRITTEN) == 1
        assert outcomes.count(PutOutcome.REFUSED) == 15
        assert store.get("s/COMMITTED") == b"writer %d" % outcomes.index(PutOutcome.WRITTEN)

    def test_after_a_delete_the_name_is_free_again(self, store: BlobStore) -> None:
        store.put("k", b"1")
        store.delete("k")
        assert store.put_if_absent("k", b"2") is PutOutcome.WRITTEN

    def test_of_eight_commits_at_once_one_returns_and_the_rest_are_refused(self, store: BlobStore) -> None:
        def commit(index: int) -> str:
            try:
                commit_marker(store, "s/COMMITTED", b'{"write_id": "w%d"}' % index, f"w{index}")
            except CommitRefused:
                return "refused"
            return "committed"

        answers = at_once(8, commit)
        assert sorted(answers) == ["committed"] + ["refused"] * 7  # type: ignore[type-var]
        assert store.get("s/COMMITTED") == b'{"write_id": "w%d"}' % answers.index("committed")


class TestReading:
    def test_a_range_is_exactly_that(self, store: BlobStore) -> None:
        body = bytes(range(100))
        store.put("k", body)
        assert store.get("k", 10, 20) == body[10:30]
        assert store.get("k", 90) == body[90:]
        assert store.get("k", 0, 100) == body
        assert store.get("k", 40, 0) == b""
        assert store.get("k", 100) == b""

    def test_a_range_is_scattered_over_many_buffers(self, store: BlobStore) -> None:
        body = bytes(range(256)) * 20
        store.put("k", body)
        buffers = [bytearray(size) for size in (1, 0, 7, *[2] * 2000, 90)]
        store.scatter("k", 3, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == body[3 : 3 + sum(map(len, buffers))]
        with pytest.raises(StorageError, match="bytes"):
            store.scatter("k", 5_000, [memoryview(bytearray(100)), memoryview(bytearray(100))])

    def test_a_range_is_read_into_a_buffer_of_the_caller(self, store: BlobStore) -> None:
        store.put("k", bytes(range(100)))
        buffer = bytearray(b"." * 30)
        store.read_into("k", 50, memoryview(buffer)[5:25])
        assert bytes(buffer) == b"....." + bytes(range(50, 70)) + b"....."
        store.read_into("k", 50, memoryview(buffer)[:0])

    def test_what_lies_in_memory_may_be_looked_at_instead_of_read(self, store: BlobStore) -> None:
        body = bytes(range(256)) * 100
        store.put("k", body)
        for start, length in ((0, 1), (5, 4091), (4096, 4096), (10_000, 15_600)):
            view = store.mapped("k", start, length)
            assert view is None or bytes(view) == body[start : start + length]
        if view is not None:
            with pytest.raises(StorageError, match="25600 bytes"):
                store.mapped("k", 25_599, 2)
            with pytest.raises(KeyError):
                store.mapped("missing", 0, 1)
            store.delete("k")
            assert bytes(view) == body[10_000:], "a view outlives the name"

    @pytest.mark.parametrize(("start", "length"), [(0, 101), (99, 2), (100, 1), (200, 1), (101, None)])
    def test_a_short_object_is_an_error_that_names_it(self, store: BlobStore, start: int, length: int | None) -> None:
        store.put("short.pack", bytes(100))
        with pytest.raises(StorageError, match=r"short\.pack"):
            store.get("short.pack", start, length)
        if length is not None:
            with pytest.raises(StorageError, match=r"short\.pack"):
                store.read_into("short.pack", start, memoryview(bytearray(length)))

    def test_a_missing_key_is_a_key_error(self, store: BlobStore) -> None:
        store.put("dir/there", b"1")
        for key in ("missing", "dir/missing", "dir", "there"):
            assert not store.exists(key)
            for call in READS:
                with pytest.raises(KeyError):
                    call(store, key)

    def test_many_threads_read_and_write_at_once(self, store: BlobStore) -> None:
        def turn(index: int) -> bool:
            body = bytes([index]) * (10_000 + index)
            store.put(f"d{index % 3}/k{index}", body)
            return store.get(f"d{index % 3}/k{index}", 5, 100) == body[:100]

        assert all(at_once(16, turn))
        assert len(list(store.list(""))) == 16


class TestListing:
    def test_keys_are_sorted_and_chosen_by_prefix(self, store: BlobStore) -> None:
        keys = ["a", "b-1", "b/1", "b/2/x", "b.1", "b0", "snapshots/0001-a/COMMITTED", "snapshots/0002-b/1/r0.pack"]
        for key in reversed(keys):
            store.put(key, b"1")
        assert list(store.list("")) == sorted(keys)
        assert list(store.list("b")) == ["b-1", "b.1", "b/1", "b/2/x", "b0"]
        assert list(store.list("b/")) == ["b/1", "b/2/x"]
        assert list(store.list("snapshots/0002")) == ["snapshots/0002-b/1/r0.pack"]
        assert list(store.list("b/2/x")) == ["b/2/x"]

    def test_a_prefix_that_nothing_has_gives_nothing(self, store: BlobStore) -> None:
        assert list(store.list("")) == []
        store.put("a/b", b"1")
        for prefix in ("x", "a/b/c", "a/x/", "ab"):
            assert list(store.list(prefix)) == []

    def test_a_write_is_listed_at_once_and_a_deletion_gone_at_once(self, store: BlobStore) -> None:
        for index in range(5):
            store.put(f"d/{index}", b"1")
            assert list(store.list("d/")) == [f"d/{n}" for n in range(index + 1)]
        store.delete("d/2")
        assert list(store.list("d/")) == ["d/0", "d/1", "d/3", "d/4"]

    def test_more_keys_than_fit_a_page(self, store: BlobStore) -> None:
        keys = [f"many/{index:05d}" for index in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b""), keys))
        assert list(store.list("many/")) == keys


class TestDeleting:
    def test_a_deleted_key_is_gone_and_its_neighbours_stay(self, store: BlobStore) -> None:
        store.put("d/a", b"1")
        store.put("d/b", b"2")
        store.delete("d/a")
        assert not store.exists("d/a")
        assert store.get("d/b") == b"2"

    def test_a_key_that_is_not_there_is_no_error(self, store: BlobStore) -> None:
        store.delete("never")
        store.delete("never/at/all")

    def test_a_key_can_be_written_again_where_a_whole_directory_was_deleted(self, store: BlobStore) -> None:
        for turn in range(3):
            store.put("x/y/z", b"%d" % turn)
            store.delete("x/y/z")
            assert list(store.list("")) == []

    def test_writers_and_deleters_of_one_directory_do_not_trip_each_other(self, store: BlobStore) -> None:
        def churn(index: int) -> bool:
            for turn in range(6):
                store.put(f"deep/er/{index}", b"%d" % turn)
                if store.get(f"deep/er/{index}") != b"%d" % turn:
                    return False
                store.delete(f"deep/er/{index}")
            return True

        assert all(at_once(8, churn))
        assert list(store.list("")) == []


class TestKeys:
    @pytest.mark.parametrize("key", OUTSIDE, ids=repr)
    def test_a_key_that_leaves_the_root_or_cannot_be_kept_everywhere_is_refused(
        self, store: BlobStore, key: str
    ) -> None:
        for call in (*READS, *WRITES):
            with pytest.raises(StorageError, match="cannot be used"):
                call(store, key)
        assert list(store.list("")) == []

    @pytest.mark.parametrize("key", UNUSUAL, ids=repr)
    def test_any_other_name_is_kept_as_it_is(self, store: BlobStore, key: str) -> None:
        assert store.put_if_absent(key, b"1") is PutOutcome.WRITTEN
        store.put(key, b"body")
        assert store.get(key, 1, 2) == b"od"
        assert store.size(key) == 4
        assert list(store.list("")) == [key]
        assert list(store.list(key[:-1])) == [key]
        store.delete(key)
        assert not store.exists(key)


class TestCheck:
    def test_a_good_store_passes_and_nothing_is_left(self, store: BlobStore) -> None:
        store.check()
        assert list(store.list("")) == []

    def test_a_store_goes_to_another_process_and_names_the_same_place(self, store: BlobStore) -> None:
        store.put("k", b"1")
        copy = pickle.loads(pickle.dumps(store))
        assert copy.url == store.url
        assert copy.get("k") == b"1"
        copy.close()

    def test_a_closed_store_opens_again(self, store: BlobStore) -> None:
        store.put("k", b"1")
        store.close()
        store.close()
        assert store.get("k") == b"1"
