"""Bring the shares of one node to durable storage: a pack per rank, then one chunk table for all of them.

Runs beside training and never holds it up. Only what an older snapshot does not hold is written; retries and backoff
are the store's. Whatever a failed upload leaves behind is named by no manifest, hence harmless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from elastic.protocol.shares import ALIGNMENT_BYTES
from elastic.snapshot.checksum import digest_text
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.delta import Delta, delta
from elastic.snapshot.drain_threads import drain_threads
from elastic.snapshot.manifest import FileRecord
from elastic.snapshot.object_names import pack_name, table_name
from elastic.snapshot.seal import pack_digest
from elastic.storage.blob_store import BlobStore

PARALLEL_UPLOADS = 4


def upload_shares(
    shares: Mapping[int, tuple[ChunkTable, npt.NDArray[np.uint8]]],
    store: BlobStore,
    prefix: str,
    *,
    node: int,
    previous: ChunkTable | None = None,
    parallel: int = PARALLEL_UPLOADS,
    nice: int = 0,
) -> tuple[list[FileRecord], ChunkTable]:
    """Write the packs of ``shares`` (rank to chunk table and bytes) and the table of ``node`` under ``prefix``.

    ``prefix`` is ``<run>/snapshots/<directory>/<attempt>``. Returns the records for the manifest, the chunk table's
    last, and that table. Durable on return; raises StorageError if any write failed, after the others have ended.
    """
    directory = prefix.split("/snapshots/", 1)[1]
    deltas = {
        rank: delta(table, previous, f"{directory}/{pack_name(rank)}") for rank, (table, _) in sorted(shares.items())
    }
    table = without_unused_packs(ChunkTable.concat([delta.table for delta in deltas.values()]))
    with drain_threads(max(1, parallel), "upload", nice) as threads:
        # By a thread that ends with the upload: what a thread has used to compress is its own as long as it lives.
        encoded = threads.submit(table.to_parquet_bytes)
        packs = [
            threads.submit(_put_pack, store, prefix, rank, delta, shares[rank][1])
            for rank, delta in deltas.items()
            if delta.pack_bytes
        ]
    body = encoded.result()
    records = [future.result() for future in packs]
    store.put(f"{prefix}/{table_name(node)}", body)
    records.append(
        FileRecord(
            table_name(node),
            "chunks",
            len(body),
            digest_text(table.algorithm, body),
            rows=len(table),
            ranks=tuple(deltas),
            referenced=tuple(sorted({pack for delta in deltas.values() for pack in delta.referenced})),
            written_bytes=sum(delta.written_bytes for delta in deltas.values()),
            referenced_bytes=sum(delta.referenced_bytes for delta in deltas.values()),
        )
    )
    return records, table


def _put_pack(store: BlobStore, prefix: str, rank: int, change: Delta, data: npt.NDArray[np.uint8]) -> FileRecord:
    name = pack_name(rank)
    if len(change.runs) == 1:
        start, end = change.runs[0].tolist()
        store.put(f"{prefix}/{name}", data[start:end].data)
    else:
        store.put_parts(f"{prefix}/{name}", _parts(change, data))
    own = change.table.take(change.table.pack_id == 0)
    return FileRecord(name, "pack", change.pack_bytes, pack_digest(own))


def _parts(change: Delta, data: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
    gap = 0
    for start, end in change.runs.tolist():
        if gap:
            yield memoryview(bytes(gap))
        yield data[start:end].data
        gap = -(end - start) % ALIGNMENT_BYTES


def without_unused_packs(table: ChunkTable) -> ChunkTable:
    """The same rows, listing only the packs that they name."""
    used, inverse = np.unique(table.pack_id, return_inverse=True)
    return replace(table, packs=tuple(table.packs[i] for i in used.tolist()), pack_id=inverse.astype(np.int32))
