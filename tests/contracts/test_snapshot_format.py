"""FORMAT.md, read by another reader: nothing of this package but what the page says."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from support.made_snapshots import RUN, SnapshotMaker, assert_holds

from elastic.errors import CommitRefused
from elastic.retention import keep_last
from elastic.snapshot.collect import collect
from elastic.snapshot.committer import commit_remote
from elastic.snapshot.manifest import VERSIONS, FileRecord
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.verify import verify
from elastic.storage.blob_store import BlobStore
from elastic.storage.local_blobs import LocalBlobs
from elastic.storage.memory_blobs import MemoryBlobs


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[SnapshotMaker]:
    made = SnapshotMaker(tmp_path / "arena")
    yield made
    made.close()


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return MemoryBlobs() if request.param == "memory" else LocalBlobs(tmp_path / "store")


def independent_load(root: Path, run: str) -> dict[str, bytes]:
    """The newest snapshot, by the page alone."""
    snapshots = root / run / "snapshots"
    marker_path = max(snapshots.glob("*/COMMITTED"))
    marker = json.loads(marker_path.read_bytes())
    attempt = marker_path.parent / marker["attempt"]
    body = (attempt / "manifest.json").read_bytes()
    assert marker["manifest_digest"] == "sha256:" + hashlib.sha256(body).hexdigest()
    manifest = json.loads(body)
    assert manifest["schema"] == 1
    tensors: dict[str, Any] = {}
    for record in manifest["files"]:
        data = (attempt / record["name"]).read_bytes()
        assert len(data) == record["nbytes"]
        if record["kind"] == "pack":
            continue
        name, _, digest = record["digest"].partition(":")
        assert name == manifest["checksum"] == "xxh3_128"
        assert xxhash.xxh3_128_hexdigest(data) == digest
        if record["kind"] == "tensors":
            for row in pq.read_table(io.BytesIO(data)).to_pylist():
                if row["alias_of"] is None:
                    tensors[row["name"]] = np.zeros((*row["shape"], row["itemsize"]), np.uint8)
    for record in manifest["files"]:
        if record["kind"] != "chunks":
            continue
        file = pq.ParquetFile(attempt / record["name"])
        head = json.loads(file.metadata.metadata[b"elastic.chunk_table"])
        for row in file.read().to_pylist():
            name, dims = head["tensors"]["name"][row["tensor"]], len(head["tensors"]["shape"][row["tensor"]])
            start, end = row["byte_start"], row["byte_start"] + row["nbytes"]
            chunk = (snapshots / head["packs"][row["pack"]]).read_bytes()[start:end]
            assert xxhash.xxh3_128_digest(chunk) == row["digest"]
            cut = tuple(slice(row[f"offset_{d}"], row[f"offset_{d}"] + row[f"shape_{d}"]) for d in range(dims))
            tensors[name][cut] = np.frombuffer(chunk, np.uint8).reshape(tensors[name][cut].shape)
    return {name: value.tobytes() for name, value in tensors.items()}


def test_a_reader_written_from_the_page_alone_reads_every_byte(maker: SnapshotMaker, tmp_path: Path) -> None:
    store = LocalBlobs(tmp_path / "store")
    first = maker.commit(store, 5)
    values = maker.values(5)
    values["embedding.weight"] = maker.values(6)["embedding.weight"]
    maker.commit(store, 6, values, previous=first)
    found = independent_load(tmp_path / "store", RUN)
    assert found == {name: value.tobytes() for name, value in values.items()}


def test_the_manifest_tells_everything_that_the_design_asks_for(maker: SnapshotMaker, store: BlobStore) -> None:
    ref = maker.commit(store, 5, metrics={"loss": 0.5})
    fields = json.loads(store.get(f"{ref.prefix}/manifest.json"))
    assert {"snapshot_id", "attempt", "step", "tokens_seen", "data_cursor", "writers", "parents"} <= set(fields)
    assert (fields["step"], fields["data_cursor"], fields["generation"]) == (5, 40, 1)
    assert set(VERSIONS) <= set(fields["versions"])
    assert fields["mesh"] == [["dp", 2], ["tp", 2]]
    assert fields["has"] == {"optimizer": True, "scheduler": False, "scaler": False, "rng": False}
    assert fields["counts"]["tensors"] == 5
    assert fields["counts"]["ranks"] == 4
    assert all(record["digest"] and record["nbytes"] > 0 for record in fields["files"])
    assert {record["name"] for record in fields["files"]} == {
        key.rpartition("/")[2] for key in store.list(ref.prefix) if not key.endswith("manifest.json")
    }


def test_what_was_saved_on_four_ranks_is_loaded_on_a_laptop(maker: SnapshotMaker, store: BlobStore) -> None:
    ref = maker.commit(store, 5)
    loaded = SnapshotCatalog(store, RUN).load(ref)
    assert_holds(loaded, maker.values(5))
    assert loaded["linear.bias"].dtype == np.float64
    assert list(SnapshotCatalog(store, RUN).load(ref, ["step", "head.weight"])) == ["step", "head.weight"]
    with pytest.raises(KeyError):
        SnapshotCatalog(store, RUN).load(ref, ["no.such"])


def test_only_changed_chunks_are_written_and_no_chain_is_replayed(maker: SnapshotMaker, store: BlobStore) -> None:
    refs = [maker.commit(store, 0)]
    values = maker.values(0)
    for step in range(1, 6):
        values["linear.bias"] = maker.values(step)["linear.bias"]
        refs.append(maker.commit(store, step, values, previous=refs[-1]))
    catalog = SnapshotCatalog(store, RUN)
    last = catalog.manifest(refs[-1])
    assert last.counts["new_bytes"] == 56
    assert last.depth == 5
    assert set(last.parents) == {refs[0].directory}
    assert_holds(catalog.load(refs[-1]), values)


def test_an_unchanged_state_writes_no_pack(maker: SnapshotMaker, store: BlobStore) -> None:
    first = maker.commit(store, 5)
    again = maker.commit(store, 6, maker.values(5), previous=first)
    assert not [key for key in store.list(again.prefix) if key.endswith(".pack")]
    assert_holds(SnapshotCatalog(store, RUN).load(again), maker.values(5))


def test_after_so_many_deltas_comes_a_full_snapshot(maker: SnapshotMaker, store: BlobStore) -> None:
    ref = maker.commit(store, 0)
    depths = []
    for step in range(1, 20):
        ref = maker.commit(store, step, maker.values(0), previous=ref)
        depths.append(ref.depth)
    assert depths == [*range(1, 17), 0, 1, 2]


def test_a_new_process_finds_unchanged_chunks_in_the_store(
    maker: SnapshotMaker, store: BlobStore, tmp_path: Path
) -> None:
    first = maker.commit(store, 5)
    other = SnapshotMaker(tmp_path / "other", mesh={"dp": 4, "tp": 2})
    other.number = 50
    again = other.commit(store, 6, maker.values(5), previous=first)
    manifest = SnapshotCatalog(store, RUN).manifest(again)
    # Cut for other ranks, some chunks are other pieces of the same tensors; those that are not are referred to.
    assert 0 < manifest.counts["new_bytes"] < manifest.counts["bytes"]
    assert_holds(SnapshotCatalog(store, RUN).load(again), maker.values(5))
    other.close()


def test_a_durable_commit_may_come_after_newer_node_snapshots(maker: SnapshotMaker, store: BlobStore) -> None:
    attempt, reports = maker.take(5)
    index_then, files = maker.upload(store, 5, attempt, 0.0)
    for step in (6, 7, 8):
        maker.take(step)
    assert attempt not in maker.tier.held()
    ref = commit_remote(
        store,
        RUN,
        maker.tier.index(attempt, maker.tier.headers(attempt), index_then.snapshot_id),
        reports,
        files,
        versions={},
        has={},
        write_id="w",
        committed_at_s=1.0,
    )
    assert_holds(SnapshotCatalog(store, RUN).load(ref), maker.values(5))


def test_a_commit_lacks_no_rank_and_no_chunk(maker: SnapshotMaker, store: BlobStore) -> None:
    attempt, reports = maker.take(5)
    index, files = maker.upload(store, 5, attempt, 0.0, ranks=[0, 1, 3])

    def commit(found: list[FileRecord]) -> None:
        commit_remote(store, RUN, index, reports, found, versions={}, has={}, write_id="w", committed_at_s=1.0)

    with pytest.raises(CommitRefused, match=r"ranks \[2\] were not uploaded"):
        commit(files)
    with pytest.raises(CommitRefused, match="more than once"):
        commit([*files, replace(files[-1], ranks=(1, 2), rows=1)])
    with pytest.raises(CommitRefused, match="chunks were uploaded"):
        commit([*files, replace(files[-1], ranks=(2,), rows=1)])
    reports.pop(2)
    with pytest.raises(CommitRefused, match="rank 2 sent no share"):
        commit(files)
    assert SnapshotCatalog(store, RUN).list() == []


def test_verify_finds_what_a_shallow_look_does_not(maker: SnapshotMaker, store: BlobStore) -> None:
    ref = maker.commit(store, 5)
    report = verify(store, RUN, ref)
    assert report.ok
    assert report.chunks == SnapshotCatalog(store, RUN).manifest(ref).counts["chunks"]
    key = next(key for key in store.list(ref.prefix) if key.endswith(".pack"))
    body = bytearray(store.get(key))
    body[0] ^= 1
    store.put(key, body)
    assert verify(store, RUN, ref, deep=False).ok
    deep = verify(store, RUN, ref)
    assert not deep.ok
    assert key.partition("/snapshots/")[2] in deep.problems[0]
    store.delete(key)
    assert not verify(store, RUN, ref, deep=False).ok


def test_collecting_keeps_what_a_kept_snapshot_refers_to(maker: SnapshotMaker, store: BlobStore) -> None:
    refs = [maker.commit(store, 0)]
    values = maker.values(0)
    for step in range(1, 4):
        values["linear.bias"] = maker.values(step)["linear.bias"]
        refs.append(maker.commit(store, step, values, previous=refs[-1]))
    collect(store, RUN, keep_last(1), now_s=2_000_000.0, grace_s=0)
    catalog = SnapshotCatalog(store, RUN)
    assert catalog.list() == refs[-1:]
    assert_holds(catalog.load(refs[-1]), values)
    left = [key for key in store.list(f"{RUN}/snapshots/") if refs[1].directory in key]
    assert left == []


def test_the_store_side_needs_neither_torch_nor_ray() -> None:
    modules = ["reader", "verify", "collect", "node_tier", "committer", "uploader", "sources"]
    code = (
        "import sys, importlib\n"
        f"for name in {modules!r}: importlib.import_module('elastic.snapshot.' + name)\n"
        "assert not {'torch', 'ray'} & set(sys.modules), sorted({'torch', 'ray'} & set(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
