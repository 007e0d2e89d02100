"""Whether a committed snapshot is what its marker says, down to every byte. Reads only, never raises for damage."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq

from elastic.errors import RestoreError
from elastic.snapshot.blob_copy import BlobCopy
from elastic.snapshot.chunk_table import ChunkTable, Ints
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.seal import pack_digest
from elastic.storage.blob_store import BlobStore

WINDOW_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """``problems`` is empty for a good snapshot. ``chunks`` and ``nbytes`` count what was read and found good."""

    ref: SnapshotRef
    deep: bool
    problems: tuple[str, ...]
    chunks: int
    nbytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(store: BlobStore, run: str, ref: SnapshotRef, deep: bool = True) -> VerifyReport:
    """Check marker, manifest, files, coverage and sizes; with ``deep`` also every chunk, with a memory of 256 MiB.

    Raises StorageError if the store does not answer: that says nothing about the snapshot.
    """
    started, problems, chunks, nbytes = time.perf_counter(), list[str](), 0, 0
    catalog = SnapshotCatalog(store, run)
    try:
        index = catalog.open(ref)
        problems += _tables_agree(store, ref, index)
        if deep:
            copy = BlobCopy(store, ref.snapshots)
            for rows in windows(index.table):
                for chunk in copy.fetch(index.table, rows):
                    if chunk is not None:
                        chunks += 1
                        nbytes += chunk.nbytes
            problems += copy.damaged
            problems += _packs_agree(catalog, ref, index.table)
    except RestoreError as error:
        problems.append(str(error))
    return VerifyReport(ref, deep, tuple(problems), chunks, nbytes, time.perf_counter() - started)


def windows(table: ChunkTable, window_bytes: int = WINDOW_BYTES) -> Iterator[Ints]:
    """All rows by pack and byte, in runs of about ``window_bytes``."""
    order = np.lexsort(np.stack([table.byte_start, table.pack_id.astype(np.int64)]))
    group = np.cumsum(table.nbytes[order]) // window_bytes
    for part in np.split(order, np.flatnonzero(np.diff(group)) + 1):
        if len(part):
            yield part


def _tables_agree(store: BlobStore, ref: SnapshotRef, index: SnapshotIndex) -> list[str]:
    """The list of logical tensors is the one that the chunk tables speak of."""
    # Not read_table: its threads may outlive the interpreter, which then aborts at its exit.
    body = io.BytesIO(store.get(f"{ref.prefix}/tensors.parquet"))
    found = pq.ParquetFile(body).read(use_threads=False).to_pylist()
    listed = {(row["name"], row["dtype"], tuple(row["shape"])) for row in found if row["alias_of"] is None}
    held = {(spec.name, spec.dtype, spec.shape) for spec in index.table.specs}
    return [f"tensor {name!r} is in one of tensors.parquet and the chunk tables only" for name, _, _ in listed ^ held]


def _packs_agree(catalog: SnapshotCatalog, ref: SnapshotRef, table: ChunkTable) -> list[str]:
    """The digest of each own pack, over its chunks, is the one in the manifest."""
    problems = []
    ids = {pack: i for i, pack in enumerate(table.packs)}
    for record in catalog.manifest(ref).files:
        if record.kind != "pack":
            continue
        i = ids.get(f"{ref.directory}/{ref.attempt}/{record.name}", -1)
        if pack_digest(table.take(table.pack_id == i)) != record.digest:
            problems.append(f"{record.name} does not have the digest of the manifest")
    return problems
