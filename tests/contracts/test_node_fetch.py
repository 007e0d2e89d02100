"""A node's fetches: each chunk once for all its ranks, checked, within a budget, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import elastic.snapshot.node_fetch as node_fetch
from elastic.errors import StorageError
from elastic.snapshot.checksum import algorithm_named
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.layout import TensorSpec
from elastic.snapshot.node_fetch import Fetched, NodeFetch
from elastic.snapshot.sources import VerifiedSource

CHUNK = 1000
ROWS = 64
SEGMENT = 4 * CHUNK


class Place:
    """A copy with every chunk but the ``lacking``; counts how often each is read."""

    name = "place"

    def __init__(self, body: np.ndarray, lacking: frozenset[int] = frozenset()) -> None:
        self.body, self.lacking, self.damaged = body, lacking, []
        self.reads = np.zeros(ROWS, int)
        self.fails = False
        self._lock = threading.Lock()

    def fetch(self, table: ChunkTable, rows: np.ndarray) -> list[memoryview | None]:
        if self.fails:
            raise StorageError("no answer from the store")
        with self._lock:
            np.add.at(self.reads, rows, 1)
        return [None if row in self.lacking else self.body[row].data for row in rows.tolist()]


@pytest.fixture
def body() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (ROWS, CHUNK), dtype=np.uint8)


@pytest.fixture
def table(body: np.ndarray) -> ChunkTable:
    digest = algorithm_named("xxh3_128").digest
    return ChunkTable(
        (TensorSpec("t", "uint8", (ROWS * CHUNK,), 1),),
        ("pack",),
        np.zeros(ROWS, np.int32),
        np.arange(ROWS)[:, None] * CHUNK,
        np.full((ROWS, 1), CHUNK),
        np.zeros(ROWS, np.int32),
        np.arange(ROWS) * CHUNK,
        np.full(ROWS, CHUNK),
        np.frombuffer(b"".join(digest(row.data) for row in body), np.uint8).reshape(ROWS, 16),
        "xxh3_128",
    )


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_fetch, "SEGMENT_BYTES", SEGMENT)


@pytest.fixture
def place(body: np.ndarray) -> Place:
    return Place(body)


def fetcher(tmp_path: Path, table: ChunkTable, place: Place, readers: int, segments: int = 4) -> NodeFetch:
    return NodeFetch(tmp_path / "fetched", table, VerifiedSource([place]), readers, budget_bytes=segments * SEGMENT)


def bytes_of(found: Fetched) -> list[bytes]:
    data = Path(found.path).read_bytes()
    return [data[start : start + CHUNK] for start in found.offset.tolist()]


def restore(fetch: NodeFetch, reader: int, rows: np.ndarray, window: int = 4) -> Iterator[tuple[int, bytes]]:
    """As a rank does: say everything, then go through it in windows, giving each back."""
    fetch.announce(reader, rows)
    for start in range(0, len(rows), window):
        part = rows[start : start + window]
        found = fetch.fetch(reader, part)
        yield from zip(part.tolist(), bytes_of(found))
        fetch.give_back(found.ticket)
    fetch.leave(reader)


def test_ranks_that_want_the_same_read_each_chunk_once_within_the_budget(
    tmp_path: Path, table: ChunkTable, place: Place, body: np.ndarray
) -> None:
    fetch = fetcher(tmp_path, table, place, readers=3)
    wanted = [np.arange(ROWS), np.arange(0, ROWS, 2), np.arange(20, ROWS)]
    with ThreadPoolExecutor(3) as ranks:
        runs = [ranks.submit(lambda r, rows: dict(restore(fetch, r, rows)), r, rows) for r, rows in enumerate(wanted)]
        for rows, run in zip(wanted, runs):
            assert run.result(30) == {row: body[row].tobytes() for row in rows.tolist()}
    assert place.reads.tolist() == [1] * ROWS
    assert (tmp_path / "fetched").stat().st_size == 4 * SEGMENT
    fetch.close()
    assert not (tmp_path / "fetched").exists()


def test_memory_is_given_back_when_the_last_that_wants_it_has_had_it(
    tmp_path: Path, table: ChunkTable, place: Place
) -> None:
    fetch = fetcher(tmp_path, table, place, readers=1, segments=1)
    fetch.announce(0, np.arange(8))
    first = fetch.fetch(0, np.arange(4))
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(fetch.fetch, 0, np.arange(4, 8))
        fetch.give_back(first.ticket)
        assert (waiting.result(5).offset >= 0).all()
    assert place.reads[:8].tolist() == [1] * 8


def test_a_rank_that_never_comes_holds_nobody_up_for_long(
    tmp_path: Path, table: ChunkTable, place: Place, body: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_fetch, "STALL_WAIT_S", 0.3)
    monkeypatch.setattr(node_fetch, "JOIN_WAIT_S", 0.3)
    fetch = fetcher(tmp_path, table, place, readers=2)
    with ThreadPoolExecutor(1) as other:
        other.submit(fetch.announce, 1, np.arange(ROWS)).result(5)
    assert dict(restore(fetch, 0, np.arange(ROWS))) == {row: body[row].tobytes() for row in range(ROWS)}
    late = dict(restore(fetch, 1, np.arange(ROWS)))
    assert late == {row: body[row].tobytes() for row in range(ROWS)}
    assert place.reads.max() == 2


def test_more_than_the_budget_is_used_rather_than_waiting_for_ever(
    tmp_path: Path, table: ChunkTable, place: Place, body: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_fetch, "STALL_WAIT_S", 0.2)
    fetch = fetcher(tmp_path, table, place, readers=1, segments=2)
    found = fetch.fetch(0, np.arange(ROWS))  # far more than it should ask for at a time
    assert bytes_of(found) == [row.tobytes() for row in body]


def test_a_chunk_that_no_copy_has_good_is_told_and_the_others_arrive(
    tmp_path: Path, table: ChunkTable, body: np.ndarray
) -> None:
    fetch = fetcher(tmp_path, table, Place(body, frozenset({2, 5})), readers=1)
    found = fetch.fetch(0, np.arange(8))
    assert [row for row, at in enumerate(found.offset.tolist()) if at < 0] == [2, 5]
    assert found.origin.tolist() == [-1 if row in (2, 5) else 0 for row in range(8)]


def test_a_store_that_does_not_answer_leaves_everything_as_it_was(
    tmp_path: Path, table: ChunkTable, place: Place, body: np.ndarray
) -> None:
    fetch = fetcher(tmp_path, table, place, readers=1, segments=1)
    place.fails = True
    for _ in range(3):
        with pytest.raises(StorageError, match="no answer"):
            fetch.fetch(0, np.arange(4))
    place.fails = False
    assert bytes_of(fetch.fetch(0, np.arange(4))) == [row.tobytes() for row in body[:4]]


def test_who_asks_after_the_end_is_refused(tmp_path: Path, table: ChunkTable, place: Place) -> None:
    fetch = fetcher(tmp_path, table, place, readers=1)
    fetch.close("another generation began")
    with pytest.raises(StorageError, match="another generation began"):
        fetch.fetch(0, np.arange(4))
