"""The chunk table as a Parquet file: plain columns, and the lists that they index in the file's metadata.

A file may come from anywhere: what it says is checked before anyone reads by it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic.errors import CorruptSnapshot, StorageError
from elastic.snapshot.checksum import algorithm_named
from elastic.snapshot.chunk_table import ChunkTable, spec_columns
from elastic.snapshot.gc_pause import gc_paused
from elastic.snapshot.layout import TensorSpec
from elastic.snapshot.object_names import check_pack

METADATA_KEY = b"elastic.chunk_table"
TABLE_SCHEMA = 1


def encode(table: ChunkTable) -> bytes:
    """The file of ``table``."""
    head = {
        "schema": TABLE_SCHEMA,
        "algorithm": table.algorithm,
        "dims": table.offset.shape[1],
        "packs": table.packs,
        "tensors": {
            "name": [spec.name for spec in table.specs],
            "dtype": [spec.dtype for spec in table.specs],
            "shape": [spec.shape for spec in table.specs],
            "itemsize": [spec.itemsize for spec in table.specs],
        },
        "aliases": table.aliases,
    }
    columns: dict[str, Any] = {"tensor": table.tensor_id, "pack": table.pack_id}
    for dim in range(table.offset.shape[1]):
        columns[f"offset_{dim}"] = table.offset[:, dim]
        columns[f"shape_{dim}"] = table.shape[:, dim]
    columns["byte_start"], columns["nbytes"] = table.byte_start, table.nbytes
    arrays = {name: pa.array(np.ascontiguousarray(column)) for name, column in columns.items()}
    digest = np.ascontiguousarray(table.digest)
    arrays["digest"] = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(digest.shape[1]), len(digest), [None, pa.py_buffer(digest)]
    )
    arrow = pa.table(arrays)
    sink = pa.BufferOutputStream()
    # Not as metadata of the schema: that would be stored a second time, in base64.
    with pq.ParquetWriter(
        sink, arrow.schema, compression="zstd", use_dictionary=False, store_schema=False, write_statistics=False
    ) as writer:
        writer.write_table(arrow)
        writer.add_key_value_metadata({METADATA_KEY: json.dumps(head, separators=(",", ":"))})
    return bytes(sink.getvalue().to_pybytes())


def decode(data: bytes | memoryview) -> ChunkTable:
    """The table in a file; CorruptSnapshot if it is none, or refers to what it does not list."""
    with gc_paused():
        return _checked(data)


def _checked(data: bytes | memoryview) -> ChunkTable:
    try:
        file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(data)))
        head = json.loads(file.metadata.metadata[METADATA_KEY])
        if head["schema"] != TABLE_SCHEMA:
            raise CorruptSnapshot(f"chunk table of schema {head['schema']}", "", "install a newer version to read it")
        table = _decode(head, file.read(use_threads=False))
        _check(table)
        return table
    except StorageError as error:
        raise CorruptSnapshot(f"chunk table names a file outside of the run: {error.where}") from error
    except (pa.ArrowException, KeyError, TypeError, ValueError, OSError) as error:
        raise CorruptSnapshot(f"not a chunk table: {type(error).__name__}: {error}") from error


def _decode(head: dict[str, Any], arrow: pa.Table) -> ChunkTable:
    tensors = head["tensors"]
    names, shapes = tensors["name"], tensors["shape"]
    rows = zip(names, tensors["dtype"], map(tuple, shapes), tensors["itemsize"], strict=True)
    specs = tuple(map(TensorSpec._make, rows))

    def column(name: str, dtype: Any) -> Any:
        found = arrow.column(name).combine_chunks()
        if isinstance(found, pa.ChunkedArray):
            found = found.chunk(0) if found.num_chunks else pa.array([], found.type)
        if found.null_count:
            raise ValueError(f"column {name} has nulls")
        return np.asarray(found.to_numpy(zero_copy_only=False), dtype)

    width = algorithm_named(head["algorithm"]).digest_bytes
    raw = arrow.column("digest").combine_chunks()
    chunks = raw.chunks if isinstance(raw, pa.ChunkedArray) else [raw]
    if any(chunk.type != pa.binary(width) or chunk.null_count for chunk in chunks):
        raise ValueError(f"a digest is not {width} bytes")
    digest = [
        np.frombuffer(chunk.buffers()[1], np.uint8)[chunk.offset * width : (chunk.offset + len(chunk)) * width]
        for chunk in chunks
        if len(chunk)
    ]
    n, dims = arrow.num_rows, head["dims"]
    return ChunkTable(
        specs,
        tuple(check_pack(pack) for pack in head["packs"]),
        column("tensor", np.int32),
        np.stack([column(f"offset_{dim}", np.int64) for dim in range(dims)], axis=1),
        np.stack([column(f"shape_{dim}", np.int64) for dim in range(dims)], axis=1),
        column("pack", np.int32),
        column("byte_start", np.int64),
        column("nbytes", np.int64),
        (np.concatenate(digest) if digest else np.zeros(0, np.uint8)).reshape(n, width),
        head["algorithm"],
        tuple((str(alias), str(name)) for alias, name in head["aliases"]),
    )


def _check(table: ChunkTable) -> None:
    """Every row lies inside of its tensor, its pack is listed, and its bytes are as many as its elements need."""
    n, dims = len(table), table.offset.shape[1]
    if any(len(spec.shape) > dims for spec in table.specs):
        raise CorruptSnapshot("chunk table: a tensor has more dimensions than the table")
    if not n:
        return
    for ids, count, what in (
        (table.tensor_id, len(table.specs), "tensor"),
        (table.pack_id, len(table.packs), "pack"),
    ):
        if ids.min() < 0 or ids.max() >= count:
            raise CorruptSnapshot(f"chunk table: a row names {what} {int(ids.max())} of {count}")
    whole, itemsize = spec_columns(table)
    wrong = ((table.offset < 0) | (table.shape < 1) | (table.offset + table.shape > whole[table.tensor_id])).any(axis=1)
    wrong |= (table.byte_start < 0) | (table.nbytes != table.shape.prod(axis=1) * itemsize[table.tensor_id])
    if wrong.any():
        raise CorruptSnapshot(f"chunk table: impossible row, {table.describe(int(np.flatnonzero(wrong)[0]))}")
