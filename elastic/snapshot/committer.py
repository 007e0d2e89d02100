"""The durable commit: what must be true, and what is written in which order, before a snapshot is readable.

Packs and chunk tables are there already, durable. Then objects, tensors, manifest, and last the marker, by a
conditional write: until then nothing refers to any of it, and a crash between any two writes leaves the older
snapshots as they were. ``latest.json`` is a hint and comes after; a failure there is no failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic.errors import CommitRefused, CorruptSnapshot, StorageError
from elastic.protocol.commit import commit_check
from elastic.protocol.shares import ShareReport
from elastic.snapshot.checksum import digest_text
from elastic.snapshot.index import ObjectTrees, SnapshotIndex
from elastic.snapshot.layout import TensorSpec
from elastic.snapshot.manifest import (
    PRESENCE,
    VERSIONS,
    FileRecord,
    Manifest,
    SnapshotRef,
    canonical_json,
    manifest_digest,
)
from elastic.snapshot.object_names import attempt_prefix, latest_key, marker_key
from elastic.snapshot.replica_check import check_replicas
from elastic.storage.blob_store import BlobStore
from elastic.storage.conditional import commit_marker

OBJECTS = "objects.json"
TENSORS = "tensors.parquet"
MANIFEST = "manifest.json"


def commit_remote(
    store: BlobStore,
    run: str,
    index: SnapshotIndex,
    reports: Sequence[ShareReport],
    files: Sequence[FileRecord],
    *,
    versions: Mapping[str, str],
    has: Mapping[str, bool],
    write_id: str,
    committed_at_s: float,
    previous: SnapshotRef | None = None,
    writers: Sequence[str] = (),
    metrics: Mapping[str, float] | None = None,
) -> SnapshotRef:
    """Commit the attempt of ``index``, whose packs and chunk tables (``files``, of all nodes) are uploaded.

    ``index`` must carry the snapshot id. ``previous`` is the snapshot that the uploads referred to, if one was given
    to them. May be called again with the same arguments after CommitUnknown. Raises CommitRefused if the shares are
    not one point in time, if they do not cover every tensor, if ranks differ in what counts as replicated, or if
    another writer has committed under this name;
    CommitUnknown and StorageError as ``commit_marker``.
    """
    point = commit_check(reports, index.world_size)
    if point != index.point or any(report.attempt != index.attempt for report in reports):
        raise CommitRefused("the reports are of another moment than the index", f"attempt {index.attempt}")
    _check_files(index, files)
    try:
        index.check_coverage()
    except CorruptSnapshot as error:
        cure = "say what each rank holds with elastic.declare: cuts=..., held_at=..., and names of the whole model"
        raise CommitRefused(error.what, f"attempt {index.attempt}", cure) from None
    check_replicas(index.objects, f"attempt {index.attempt}")

    prefix = attempt_prefix(run, index.step, index.snapshot_id, index.attempt)
    algorithm = index.table.algorithm
    records = list(files)
    with ThreadPoolExecutor(1) as thread:  # that ends, and with it what it used to compress, which is its own
        tensors = thread.submit(tensors_bytes, index.table.specs, index.table.aliases).result()
    for name, kind, body in (
        (OBJECTS, "objects", objects_bytes(index.objects)),
        (TENSORS, "tensors", tensors),
    ):
        store.put(f"{prefix}/{name}", body)
        records.append(FileRecord(name, kind, len(body), digest_text(algorithm, body)))
    parents = _parents(files)
    manifest = Manifest(
        run=run,
        snapshot_id=index.snapshot_id,
        attempt=index.attempt,
        point=point,
        created_at_s=committed_at_s,
        mesh=index.mesh,
        versions={name: versions.get(name, "") for name in VERSIONS} | dict(versions),
        has={name: has.get(name, False) for name in PRESENCE} | dict(has),
        checksum=algorithm,
        files=tuple(records),
        parents=parents,
        depth=(previous.depth if previous else 0) + 1 if parents else 0,
        writers=tuple(writers),
        counts={
            "tensors": len(index.table.specs),
            "chunks": len(index.table),
            "bytes": index.table.total_bytes,
            "new_bytes": sum(record.written_bytes for record in files),
            "ranks": index.world_size,
        },
        metrics=dict(metrics or {}),
    )
    body = manifest.to_bytes()
    store.put(f"{prefix}/{MANIFEST}", body)
    ref = SnapshotRef(
        run,
        index.step,
        index.snapshot_id,
        index.attempt,
        manifest_digest(body),
        write_id,
        committed_at_s,
        manifest.depth,
    )
    commit_marker(store, marker_key(run, index.step, index.snapshot_id), ref.to_bytes(), write_id)
    with contextlib.suppress(StorageError):
        store.put(latest_key(run), ref.to_bytes())
    return ref


def objects_bytes(objects: ObjectTrees) -> bytes:
    """The file of the trees: per rank a digest, per digest a tree, as the text that the digest was made of."""
    return canonical_json(
        {
            "schema": 1,
            "ranks": objects.ranks,
            "trees": {digest: tree.decode() for digest, tree in objects.trees.items()},
        }
    )


def tensors_bytes(specs: Sequence[TensorSpec], aliases: Sequence[tuple[str, str]]) -> bytes:
    """The file of the logical tensors: name, dtype, shape, item size, and for a tied name the tensor it stands for."""
    by_name = {spec.name: spec for spec in specs} if aliases else {}
    rows = [*specs, *(by_name[name] for _, name in aliases)]
    shapes = [spec.shape for spec in rows]
    ends = np.cumsum([0, *map(len, shapes)], dtype=np.int32)
    arrow = pa.table(
        {
            "name": pa.array([*(spec.name for spec in specs), *(alias for alias, _ in aliases)], pa.string()),
            "dtype": pa.array([spec.dtype for spec in rows], pa.string()),
            "shape": pa.ListArray.from_arrays(ends, np.fromiter(chain.from_iterable(shapes), np.int64, ends[-1])),
            "itemsize": pa.array([spec.itemsize for spec in rows], pa.int32()),
            "alias_of": pa.array([*repeat(None, len(specs)), *(name for _, name in aliases)], pa.string()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(arrow, sink, compression="zstd", use_dictionary=False, write_statistics=False)
    return bytes(sink.getvalue().to_pybytes())


def _check_files(index: SnapshotIndex, files: Sequence[FileRecord]) -> None:
    """Every rank's share is described by exactly one chunk table, and no row is missing."""
    tables = [record for record in files if record.kind == "chunks"]
    uploaded = sorted(rank for record in tables for rank in record.ranks)
    if uploaded != list(range(index.world_size)):
        missing = sorted(set(range(index.world_size)) - set(uploaded))
        what = f"the shares of ranks {missing[:8]} were not" if missing else "a share was more than once"
        raise CommitRefused(f"{what} uploaded", f"attempt {index.attempt}", "upload each share from one node")
    if (rows := sum(record.rows for record in tables)) != len(index.table):
        raise CommitRefused(f"{rows} chunks were uploaded, the shares have {len(index.table)}", index.attempt)


def _parents(files: Sequence[FileRecord]) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for record in files:
        for pack in record.referenced:
            found.setdefault(pack.split("/", 1)[0], set()).add(pack)
    return {directory: tuple(sorted(packs)) for directory, packs in sorted(found.items())}
