"""Sealing: the checksum of every chunk of a staged share, straight from the map, over a few threads.

The hash functions let go of the interpreter lock, so two threads hash twice as fast; chunks are handed out in
batches, because 20,000 small ones would otherwise cost more in hand-over than in hashing.
"""

from __future__ import annotations

import json
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from elastic.snapshot.checksum import algorithm_named
from elastic.snapshot.chunk_table import ChunkTable

BATCH_BYTES = 32 << 20
BATCH_ROWS = 1024


def seal(table: ChunkTable, data: npt.NDArray[np.uint8], threads: Executor) -> ChunkTable:
    """``table`` with the digests of its chunks as they lie in ``data``, the bytes of its one pack."""
    return replace(table, digest=digest_chunks(data, table.byte_start, table.nbytes, table.algorithm, threads))


def digest_chunks(
    data: npt.NDArray[np.uint8],
    byte_start: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    algorithm: str,
    threads: Executor,
) -> npt.NDArray[np.uint8]:
    """Digests uint8 [n, width] of the ranges of ``data``."""
    kind = algorithm_named(algorithm)
    view = data.data

    def digest(batch: slice) -> bytes:
        return b"".join(
            kind.digest(view[start : start + length])
            for start, length in zip(byte_start[batch].tolist(), nbytes[batch].tolist())
        )

    found = b"".join(threads.map(digest, batches(nbytes)))
    return np.frombuffer(found, np.uint8).reshape(len(nbytes), kind.digest_bytes)


def batches(nbytes: npt.NDArray[np.int64]) -> list[slice]:
    """Cut rows into runs of at most BATCH_ROWS rows and about BATCH_BYTES."""
    if not len(nbytes):
        return []
    group = np.maximum(np.cumsum(nbytes) // BATCH_BYTES, 0) * (len(nbytes) + 1) + np.arange(len(nbytes)) // BATCH_ROWS
    edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(nbytes)]
    return [slice(start, stop) for start, stop in zip(edges, edges[1:])]


def table_digest(table: ChunkTable, objects: bytes) -> str:
    """``algorithm:hex`` over tensors, element ranges, checksums and objects of a share: equal for equal content,
    wherever the bytes lie."""
    kind = algorithm_named(table.algorithm)
    columns = (table.tensor_id, table.offset, table.shape, table.nbytes, table.digest)
    specs = table.specs
    tensors = [[spec.name for spec in specs], [spec.dtype for spec in specs], [spec.shape for spec in specs]]
    parts = [
        json.dumps([tensors, table.aliases]).encode(),
        *(np.ascontiguousarray(column).tobytes() for column in columns),
        objects,
    ]
    return f"{table.algorithm}:{kind.digest(b''.join(kind.digest(part) for part in parts)).hex()}"


def digest_objects(objects: bytes, algorithm: str) -> str:
    """``algorithm:hex`` of a tree of objects: trees with the same digest are kept once."""
    return f"{algorithm}:{algorithm_named(algorithm).digest(objects).hex()}"


def pack_digest(table: ChunkTable) -> str:
    """``tree:algorithm:hex`` of a pack: the digest of the digests of its chunks, in the order of ``byte_start``."""
    kind = algorithm_named(table.algorithm)
    order = np.argsort(table.byte_start, kind="stable")
    return f"tree:{table.algorithm}:{kind.digest(np.ascontiguousarray(table.digest[order]).tobytes()).hex()}"
