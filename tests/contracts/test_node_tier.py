"""What the node tier promises to the store actor, the ranks and the peers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.made_snapshots import SnapshotMaker
from support.replicas import accept_share

from elastic.errors import CommitRefused, ConfigError, CorruptSnapshot, InternalError, SnapshotError, StorageError
from elastic.snapshot.arena import ArenaPool, sweep_arenas
from elastic.snapshot.blob_copy import BlobCopy
from elastic.snapshot.held_share import ShareHeader
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.sources import TwinCopy, VerifiedSource
from elastic.storage.blob_store import BlobStore
from elastic.storage.memory_blobs import MemoryBlobs

MIB = 1 << 20


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[SnapshotMaker]:
    made = SnapshotMaker(tmp_path / "arena")
    yield made
    made.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[NodeTier]:
    made = NodeTier(tmp_path / "peer")
    made.reserve(MIB, 0, 4)
    yield made
    made.close()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ArenaPool]:
    made = ArenaPool(tmp_path / "pool")
    yield made
    made.close()


# ---- the arena


def test_a_slot_is_given_out_again_only_when_all_its_users_have_let_go(pool: ArenaPool) -> None:
    pool.reserve(1, 1000)
    slot = pool.take(1000)
    assert slot is not None
    assert pool.take(1) is None
    pool.hold(slot)
    pool.release(slot)
    assert pool.take(1) is None
    pool.release(slot)
    assert pool.take(1) == slot
    pool.release(slot)
    with pytest.raises(InternalError):
        pool.release(slot)


def test_reserving_again_makes_only_what_is_missing_and_replaces_what_is_too_small(pool: ArenaPool) -> None:
    pool.reserve(2, 1000)
    before = pool.slots
    pool.reserve(2, 500)
    assert pool.slots == before
    held = pool.take(10)
    pool.reserve(2, 2 * MIB)
    assert sorted(slot.capacity_bytes for slot in pool.slots) == [4096, 2 * MIB, 2 * MIB]
    assert held in pool.slots
    assert len({slot.path for slot in (*before, *pool.slots)}) == 4


def test_a_share_that_has_grown_gets_a_larger_slot(pool: ArenaPool) -> None:
    pool.reserve(1, 1000)
    slot = pool.take(MIB)
    assert slot is not None
    assert slot.capacity_bytes == MIB
    assert os.stat(slot.path).st_size == MIB
    assert os.stat(slot.path).st_blocks * 512 >= MIB
    assert len(pool.slots) == 1


def test_too_little_room_is_said_with_the_numbers_and_the_cure(pool: ArenaPool) -> None:
    with pytest.raises(StorageError, match=r"needs 4194304.00 GiB more .*free.*enlarge"):
        pool.reserve(4, 1 << 50)
    assert pool.slots == ()
    pool.reserve(1, 1000)


def test_nothing_is_left_behind_and_other_files_are_not_touched(tmp_path: Path) -> None:
    pool = ArenaPool(tmp_path / "pool")
    pool.reserve(2, 1000)
    (tmp_path / "pool" / "mine.txt").write_text("keep")
    pool.close()
    pool.close()
    assert [path.name for path in (tmp_path / "pool").iterdir()] == ["mine.txt"]
    other = ArenaPool(tmp_path / "other")
    other.reserve(1, 1000)
    other.close()
    assert not (tmp_path / "other").exists()


def test_an_arena_has_one_owner_and_one_of_a_dead_process_is_swept(tmp_path: Path) -> None:
    living = ArenaPool(tmp_path / "elastic-arena-living")
    living.reserve(1, 1000)
    with pytest.raises(StorageError, match="another process"):
        ArenaPool(tmp_path / "elastic-arena-living")
    code = (
        "import os, sys; from elastic.snapshot.arena import ArenaPool; pool = ArenaPool(sys.argv[1]);"
        "pool.reserve(1, 1000); os._exit(9)"
    )
    dead = tmp_path / "elastic-arena-dead"
    subprocess.run([sys.executable, "-c", code, str(dead)], check=False, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert list(dead.glob("slot-*"))
    assert sweep_arenas(tmp_path) == [str(dead)]
    assert not dead.exists()
    assert living.take(10) is not None
    living.close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="arena"):
        ArenaPool(tmp_path / "file" / "arena")


# ---- one node


def test_what_is_not_committed_is_never_readable(maker: SnapshotMaker) -> None:
    old, _ = maker.take(1)
    slots = maker.tier.open_attempt("g1-new", {share.rank: share.nbytes for share in maker.shares})
    assert slots is not None
    for rank, slot in slots.items():
        maker.tier.seal(maker.stage(2, maker.values(2), rank, slot, "g1-new", 1))
    table = maker.tier.index("g1-new").table
    assert maker.tier.held() == {old: {0, 1, 2, 3}}
    assert maker.tier.pending() == {"g1-new": {0, 1, 2, 3}}
    assert maker.tier.tables("g1-new") == {}
    assert maker.tier.locate("g1-new/r00000.pack") is None
    with pytest.raises(SnapshotError):
        maker.tier.source("g1-new").read(table, np.arange(len(table)))
    maker.tier.commit("g1-new")
    assert maker.tier.held() == {"g1-new": {0, 1, 2, 3}}
    assert len(maker.tier.source("g1-new").read(table, np.arange(len(table)))) == len(table)


def test_every_byte_of_a_share_is_read_back(maker: SnapshotMaker) -> None:
    attempt, _ = maker.take(7)
    index = maker.tier.index(attempt)
    index.check_coverage()
    assert index.table.aliases == (("head.weight", "embedding.weight"),)
    values = maker.values(7)
    for row, chunk in enumerate(maker.tier.source(attempt).read(index.table, np.arange(len(index.table)))):
        spec = index.table.specs[index.table.tensor_id[row]]
        part = values[spec.name][index.table.box(row).within(spec.box)]
        assert bytes(chunk) == np.ascontiguousarray(part).tobytes()
    assert index.objects.of(3) == b'{"optimizer":{"lr":0.1}}'
    assert len(index.objects.trees) == 1


def test_slots_are_bounded_and_the_committed_one_is_kept_until_the_next(maker: SnapshotMaker) -> None:
    sizes = {share.rank: share.nbytes for share in maker.shares}
    maker.take(1)
    assert maker.tier.open_attempt("g1-a", sizes) is not None
    assert maker.tier.open_attempt("g1-b", sizes) is not None
    assert maker.tier.open_attempt("g1-c", sizes) is None
    assert maker.tier.arena.free_slots == 0
    maker.tier.abandon("g1-a")
    assert maker.tier.arena.free_slots == 4
    maker.tier.abandon("g1-b", ranks_quiet=True)
    for step in range(2, 30):
        maker.take(step)
    assert len(maker.tier.arena.slots) == 12
    assert maker.tier.arena.free_slots == 8


def test_opening_twice_gives_the_same_slots(maker: SnapshotMaker) -> None:
    sizes = {share.rank: share.nbytes for share in maker.shares}
    assert maker.tier.open_attempt("g1-a", sizes) == maker.tier.open_attempt("g1-a", sizes)


def test_a_slot_of_the_former_snapshot_is_not_reused_while_it_is_read(maker: SnapshotMaker) -> None:
    old, _ = maker.take(1)
    with maker.tier.pinned(old) as shares:
        before = {rank: maker.tier.arena.view(share.slot).copy() for rank, share in shares.items()}
        maker.take(2)
        maker.take(3)
        for rank, share in shares.items():
            assert np.array_equal(maker.tier.arena.view(share.slot), before[rank])
        assert maker.tier.arena.free_slots == 4
    assert maker.tier.arena.free_slots == 8


def test_a_rank_that_still_copies_into_an_abandoned_slot_harms_nobody(maker: SnapshotMaker) -> None:
    slots = maker.tier.open_attempt("g1-late", {share.rank: share.nbytes for share in maker.shares})
    assert slots is not None
    late = [maker.tier.arena.view(slot) for slot in slots.values()]
    staged = maker.stage(1, maker.values(1), 0, slots[0], "g1-late", 1)
    maker.tier.abandon("g1-late")
    attempt, _ = maker.take(2)
    maker.take(3)
    maker.take(4)
    attempt, _ = maker.take(5)
    for view in late:
        view[:] = 0xFF
    table = maker.tier.index(attempt).table
    maker.tier.source(attempt).read(table, np.arange(len(table)))
    with pytest.raises(SnapshotError, match="given up"):
        maker.tier.seal(staged)


def test_a_replica_that_comes_after_its_attempt_was_given_up_is_refused(maker: SnapshotMaker, peer: NodeTier) -> None:
    attempt, _ = maker.take(1)
    header, data = maker.tier.export_share(attempt, 0)
    peer.abandon(attempt)
    free = peer.arena.free_slots
    with pytest.raises(SnapshotError, match="given up"):
        accept_share(peer, attempt, 0, header, data)
    with pytest.raises(SnapshotError, match="given up"):
        peer.open_attempt(attempt, {0: 10})
    with pytest.raises(SnapshotError, match="given up"):
        peer.commit(attempt)
    assert peer.arena.free_slots == free
    assert peer.pending() == {}


def test_a_commit_with_an_unsealed_share_is_refused(maker: SnapshotMaker) -> None:
    slots = maker.tier.open_attempt("g1-a", {0: 100})
    assert slots is not None
    with pytest.raises(CommitRefused, match=r"\[0\]"):
        maker.tier.commit("g1-a")


def test_a_plan_is_sent_once_and_asked_for_where_it_is_not_known(maker: SnapshotMaker) -> None:
    maker.take(1)
    slots = maker.tier.open_attempt("g1-a", {share.rank: share.nbytes for share in maker.shares})
    assert slots is not None
    staged = maker.stage(2, maker.values(2), 1, slots[1], "g1-a", 1)
    report = maker.tier.seal(replace(staged, plan=None))
    assert report.nbytes == staged.used_bytes
    with pytest.raises(SnapshotError, match="send the plan"):
        maker.tier.seal(replace(staged, plan=None, plan_key="unknown"))


def test_the_digest_of_a_share_names_its_content(maker: SnapshotMaker) -> None:
    _, first = maker.take(1)
    _, again = maker.take(1)
    _, other = maker.take(2)
    assert [report.digest for report in first] == [report.digest for report in again]
    assert all(a.digest != b.digest for a, b in zip(first, other) if a.nbytes)


def test_shares_of_different_steps_make_no_index(maker: SnapshotMaker) -> None:
    slots = maker.tier.open_attempt("g1-a", {share.rank: share.nbytes for share in maker.shares})
    assert slots is not None
    for rank, slot in slots.items():
        maker.tier.seal(maker.stage(5 + (rank == 2), maker.values(5), rank, slot, "g1-a", 1))
    with pytest.raises(CommitRefused, match="step differs: ranks 0, 1, 3: 5; rank 2: 6"):
        maker.tier.index("g1-a")


def test_a_new_generation_closes_all_that_is_open(maker: SnapshotMaker) -> None:
    committed, _ = maker.take(1)
    sizes = {share.rank: share.nbytes for share in maker.shares}
    maker.tier.open_attempt("g1-a", sizes)
    maker.tier.open_attempt("g1-b", sizes)
    maker.tier.abandon_open()
    assert maker.tier.pending() == {}
    assert maker.tier.committed == committed
    assert maker.tier.arena.free_slots == 8


@pytest.mark.parametrize("algorithm", ["xxh3_128", "blake3", "sha256"])
def test_every_checksum_finds_a_flipped_bit_of_the_arena(tmp_path: Path, algorithm: str) -> None:
    maker = SnapshotMaker(tmp_path / algorithm, algorithm=algorithm)
    attempt, _ = maker.take(1)
    table = maker.tier.index(attempt).table
    assert table.algorithm == algorithm
    row = len(table) // 2
    slot = maker.tier.locate(table.packs[table.pack_id[row]])
    assert slot is not None
    maker.tier.arena.view(slot)[table.byte_start[row]] ^= 1
    with pytest.raises(CorruptSnapshot) as caught:
        maker.tier.source(attempt).read(table, np.arange(len(table)))
    assert table.describe(row) in str(caught.value)
    maker.close()


def test_an_unknown_checksum_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="crc32"):
        NodeTier(tmp_path / "arena", algorithm="crc32")
    assert not (tmp_path / "arena").exists()


# ---- peers


def replicate(maker: SnapshotMaker, peer: NodeTier, attempt: str) -> None:
    for rank in sorted(maker.tier.held()[attempt]):
        header, data = maker.tier.export_share(attempt, rank)
        accept_share(peer, attempt, rank, header, data)


def test_a_replica_is_the_share_and_survives_the_node(maker: SnapshotMaker, peer: NodeTier) -> None:
    attempt, reports = maker.take(1)
    header, data = maker.tier.export_share(attempt, 0)
    half = len(data) // 2
    report = accept_share(peer, attempt, 0, header, [data[:half], data[half:]])
    assert (report.digest, report.point) == (reports[0].digest, reports[0].point)
    replicate(maker, peer, attempt)
    table = maker.tier.index(attempt).table
    own = [bytes(chunk) for chunk in maker.tier.source(attempt).read(table, np.arange(len(table)))]
    peer.commit(attempt)
    maker.tier.close()
    index = peer.index(attempt)
    assert [bytes(chunk) for chunk in peer.source(attempt).read(index.table, np.arange(len(table)))] == own
    maker.tier = NodeTier(peer.arena.directory.parent / "arena")


@pytest.mark.parametrize("what", ["data", "header", "short", "long"])
def test_a_replica_that_is_damaged_on_the_way_is_not_held(maker: SnapshotMaker, peer: NodeTier, what: str) -> None:
    attempt, _ = maker.take(1)
    header, view = maker.tier.export_share(attempt, 0)
    data, head = bytearray(view), bytearray(header)
    if what == "data":
        data[int(ShareHeader.from_bytes(header).table.byte_start[-1])] ^= 4
    elif what == "header":
        head[-1] ^= 4
    else:
        data = data[:-1] if what == "short" else data + b"\0"
    free = peer.arena.free_slots
    with pytest.raises((CorruptSnapshot, ValueError)):
        accept_share(peer, attempt, 0, bytes(head), data)
    assert peer.arena.free_slots == free
    assert not peer.headers(attempt)


def test_a_bad_chunk_is_read_from_the_next_copy(maker: SnapshotMaker, peer: NodeTier) -> None:
    store: BlobStore = MemoryBlobs()
    ref = maker.commit(store, 1)
    attempt = ref.attempt
    replicate(maker, peer, attempt)
    peer.commit(attempt)
    table = maker.tier.index(attempt).table
    rows = np.arange(len(table))
    good = [bytes(chunk) for chunk in maker.tier.source(attempt).read(table, rows)]

    def spoil(tier: NodeTier, row: int) -> None:
        slot = tier.locate(table.packs[table.pack_id[row]])
        assert slot is not None
        tier.arena.view(slot)[table.byte_start[row]] ^= 1

    spoil(maker.tier, 0)
    spoil(maker.tier, 3)
    spoil(peer, 3)
    twin = TwinCopy(SnapshotCatalog(store, ref.run).open(ref).table, BlobCopy(store, ref.snapshots))
    source = maker.tier.source(attempt, [("peer", peer.serve)], twin)
    assert [bytes(chunk) for chunk in source.read(table, rows)] == good
    assert source.bytes_from["peer"] == table.nbytes[0]
    assert source.bytes_from["remote"] == table.nbytes[3]
    assert len(source.damaged) == 3
    with pytest.raises(CorruptSnapshot) as caught:
        maker.tier.source(attempt, [("peer", peer.serve)]).read(table, rows)
    assert table.describe(3) in str(caught.value)


def test_a_peer_that_lacks_a_share_and_no_copy_at_all_are_said(maker: SnapshotMaker, peer: NodeTier) -> None:
    attempt, _ = maker.take(1)
    table = maker.tier.index(attempt).table
    assert peer.serve(table.packs[0], table.byte_start[:1], table.nbytes[:1]) is None
    with pytest.raises(CorruptSnapshot, match="nowhere"):
        VerifiedSource([]).read(table, np.arange(1))
    with pytest.raises(SnapshotError, match="not held"):
        maker.tier.export_share(attempt, 9)


def test_replicas_may_come_late_or_twice_but_not_into_a_full_arena(maker: SnapshotMaker, peer: NodeTier) -> None:
    attempt, _ = maker.take(1)
    header, data = maker.tier.export_share(attempt, 0)
    for _ in range(20):
        accept_share(peer, attempt, 0, header, data)
    assert peer.arena.free_slots == len(peer.arena.slots) - 1
    while peer.arena.take(1) is not None:
        pass
    header, data = maker.tier.export_share(attempt, 1)
    with pytest.raises(SnapshotError, match="no free arena slot"):
        accept_share(peer, attempt, 1, header, data)


def test_threads_that_seal_commit_and_read_do_not_disturb_each_other(maker: SnapshotMaker) -> None:
    store = MemoryBlobs()
    stop = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        while not stop.is_set():
            attempt = maker.tier.committed
            if attempt is None:
                continue
            try:
                with maker.tier.pinned(attempt) as shares:
                    if len(shares) == 4:
                        maker.tier.upload(attempt, store, f"run/snapshots/000000000001-x/{attempt}", node=0)
                        for rank in range(4):
                            header, data = maker.tier.export_share(attempt, rank)
                            head = ShareHeader.from_bytes(header)
                            rows = head.table.nbytes
                            assert len(data) == head.used_bytes
                            assert rows.sum() <= len(data)
            except SnapshotError:
                continue  # It was replaced in between.
            except BaseException as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    taken = 0
    for step in range(30):
        try:
            maker.take(step)
            taken += 1
        except AssertionError:
            maker.tier.abandon_open()  # Every slot was held by a reader.
    stop.set()
    for thread in readers:
        thread.join()
    assert errors == []
    assert taken
    assert maker.tier.arena.free_slots == 8
