"""A durable snapshot with a damaged pack: given up by one run, skipped by the next, back when it was found whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.made_snapshots import RUN, SnapshotMaker
from typer.testing import CliRunner

from actors.resume import give_up, start_of, what_is_durable
from elastic.cli.main import build
from elastic.errors import CorruptSnapshot
from elastic.protocol import run_lifecycle as life
from elastic.protocol.machine import Machine
from elastic.protocol.tiers import RemoteSnapshot
from elastic.retention import keep_last
from elastic.snapshot.collect import collect
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.quarantine import quarantine
from elastic.snapshot.reader import SnapshotCatalog
from elastic.storage.local_blobs import LocalBlobs


@pytest.fixture
def store(tmp_path: Path) -> LocalBlobs:
    return LocalBlobs(tmp_path / "store")


@pytest.fixture
def refs(tmp_path: Path, store: LocalBlobs) -> Iterator[list[SnapshotRef]]:
    """Steps 10 and 20."""
    maker = SnapshotMaker(tmp_path / "arena")
    yield [maker.commit(store, 10), maker.commit(store, 20)]
    maker.close()


def flip(store: LocalBlobs, ref: SnapshotRef) -> None:
    """Change one bit of a pack, or change it back."""
    key = next(key for key in store.list(ref.prefix) if key.endswith(".pack"))
    body = bytearray(store.get(key))
    body[len(body) // 2] ^= 1
    store.put(key, body)


def snapshots(store: LocalBlobs, *arguments: str, exit_code: int = 0) -> Any:
    path = store.url.removeprefix("file://")
    shown = CliRunner().invoke(build(), ["snapshots", *arguments, "--storage", path, "--json"])
    assert shown.exit_code == exit_code, shown.output
    return json.loads(shown.stdout.splitlines()[-1])


class OneRank:
    """A run of one rank that really reads what it is ordered to restore, and performs what comes of that."""

    def __init__(self, store: LocalBlobs) -> None:
        self.store, self.restored = store, -1
        self.ended: life.EndRun | None = None
        found = what_is_durable(store, RUN)
        self.machine: Machine[life.RunState] = Machine(
            "run", life.TABLE, life.resumed(life.RunState(life.Limits({"dp": -1}, 1, 1), target=1), 1, found.snapshots)
        )
        for event in (life.ClusterSeen(0, {"n": (1, "n")}), life.StoreReady(1, "n"), life.MemberReady(2, "m0000")):
            self._tell(event)
        while self.restored < 0 and self.ended is None:
            assert self.machine.state.deadline is not None
            self._tell(life.Tick(self.machine.state.deadline))  # it waits between failures

    def _tell(self, event: Any) -> None:
        for command in self.machine.handle(event):
            if isinstance(command, life.BeginGeneration):
                assert command.restore is not None
                assert command.restore.remote is not None
                self._restore(command.generation, command.restore.remote)
            elif isinstance(command, life.Quarantine):
                give_up(self.store, RUN, command.snapshot.attempt, command.reason)
            elif isinstance(command, life.EndRun):
                self.ended = command

    def _restore(self, generation: int, snapshot: RemoteSnapshot) -> None:
        catalog = SnapshotCatalog(self.store, RUN)
        ref = next(ref for ref in catalog.list() if ref.attempt == snapshot.attempt)
        try:
            catalog.load(ref)
        except CorruptSnapshot as error:
            gone = life.Departure("m0000", 0, "unreadable", -1, 3.0, str(error), failure=error)
            self._tell(life.Departed(3.0, generation, gone))
        else:
            self.restored = ref.step


def test_a_damaged_snapshot_is_given_up_once_and_for_all_and_comes_back_when_it_is_whole(
    store: LocalBlobs, refs: list[SnapshotRef]
) -> None:
    flip(store, refs[1])
    before = set(store.list(""))
    run = OneRank(store)
    assert run.restored == 10
    assert run.machine.state.generation == 4  # twice the new one, then the old one
    (note,) = set(store.list("")) - before - {f"{RUN}/run.json"}
    assert note == f"{RUN}/snapshots/{refs[1].directory}/QUARANTINED"

    again = what_is_durable(store, RUN)
    assert [snapshot.step for snapshot in again.snapshots] == [10]
    (told,) = again.skipped
    assert "step 20" in told
    assert "chunk" in told
    assert OneRank(store).machine.state.generation == 2  # at the first try

    rows = snapshots(store, "list")["snapshots"]
    assert [bool(row["quarantined"]) for row in rows] == [True, False]
    assert "chunk" in snapshots(store, "show", "20")["quarantined"]
    assert snapshots(store, "verify", "20", "--deep", exit_code=5)["snapshots"][0]["released"] is False

    flip(store, refs[1])
    assert snapshots(store, "verify", "20")["snapshots"][0]["released"] is False  # it did not look at every byte
    assert snapshots(store, "verify", "20", "--deep")["snapshots"][0]["released"] is True
    assert [snapshot.step for snapshot in what_is_durable(store, RUN).snapshots] == [20, 10]
    assert set(store.list("")) == before | {f"{RUN}/run.json"}


def test_a_run_whose_every_snapshot_is_damaged_does_not_begin_anew_in_silence(
    store: LocalBlobs, refs: list[SnapshotRef]
) -> None:
    for ref in refs:
        flip(store, ref)
    run = OneRank(store)
    assert run.restored == -1
    assert run.ended is not None
    assert run.ended.kind == "refused"
    with pytest.raises(CorruptSnapshot, match=r"every snapshot .* verify --all --deep"):
        what_is_durable(store, RUN)


def test_collection_does_not_count_a_quarantined_snapshot_as_the_last_good_one(
    store: LocalBlobs, refs: list[SnapshotRef]
) -> None:
    quarantine(store, refs[1], "a chunk is damaged", 1.0)
    report = collect(store, RUN, keep_last(1), now_s=1e10, grace_s=0)
    assert report.drop == ()
    assert report.reasons[refs[0].directory] == "the newest"
    assert set(SnapshotCatalog(store, RUN).list()) == set(refs)
    assert store.exists(f"{RUN}/snapshots/{refs[1].directory}/QUARANTINED")


def test_the_note_goes_with_its_snapshot(store: LocalBlobs, refs: list[SnapshotRef]) -> None:
    quarantine(store, refs[0], "a chunk is damaged", 1.0)
    for _ in range(2):
        collect(store, RUN, keep_last(1), now_s=1e10, grace_s=0)
    assert not list(store.list(f"{RUN}/snapshots/{refs[0].directory}/"))


def test_the_latest_of_another_run_is_not_one_in_quarantine_unless_it_is_named(
    store: LocalBlobs, refs: list[SnapshotRef]
) -> None:
    quarantine(store, refs[1], "a chunk is damaged", 1.0)
    assert start_of(RUN, "strict", store, "new").step == 10
    assert start_of(f"{RUN}@20", "strict", store, "new").step == 20


def test_the_first_reason_stays_and_a_note_that_cannot_be_read_counts(
    store: LocalBlobs, refs: list[SnapshotRef]
) -> None:
    quarantine(store, refs[1], "first", 1.0)
    quarantine(store, refs[1], "second", 2.0)
    catalog = SnapshotCatalog(store, RUN)
    assert catalog.restorable() == [refs[0]]
    assert catalog.failed[refs[1].directory] == "first"
    store.put(f"{RUN}/snapshots/{refs[0].directory}/QUARANTINED", b"{")
    catalog = SnapshotCatalog(store, RUN)
    assert catalog.restorable() == []
    assert catalog.newest_good() is None
