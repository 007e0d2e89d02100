"""Weights from elsewhere become a committed snapshot, through one pass over their bytes.

One pack, one chunk table, and then the ordinary commit: what is imported is checked and read like any other snapshot.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from elastic.errors import ConfigError
from elastic.mesh import Mesh
from elastic.protocol.shares import ALIGNMENT_BYTES, PointInTime, ShareReport
from elastic.snapshot.checksum import DEFAULT_ALGORITHM, algorithm_named, check_algorithm, digest_text
from elastic.snapshot.chunk_table import ChunkTable, table_of_pieces
from elastic.snapshot.committer import commit_remote
from elastic.snapshot.foreign import ForeignPart, ForeignTensor
from elastic.snapshot.index import ObjectTrees, SnapshotIndex, check_coverage
from elastic.snapshot.layout import TensorSpec
from elastic.snapshot.manifest import SCHEMA, FileRecord, SnapshotRef
from elastic.snapshot.names import canonical, check_distinct
from elastic.snapshot.object_names import attempt_name, attempt_prefix, new_snapshot_id, pack_name, table_name
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.save_plan import Piece
from elastic.snapshot.seal import digest_objects, pack_digest, table_digest
from elastic.snapshot.tree import encode
from elastic.storage.blob_store import BlobStore, Buffer

GENERATION = 0
"""No run has written an imported snapshot; generations of runs begin at 1."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was imported. ``nbytes`` without those of tied names."""

    ref: SnapshotRef
    tensors: int
    ties: int
    nbytes: int


def import_weights(
    store: BlobStore,
    run: str,
    tensors: Sequence[ForeignTensor],
    *,
    now_s: float,
    step: int = 0,
    attached_as: str = "model",
    versions: dict[str, str] | None = None,
    algorithm: str = DEFAULT_ALGORITHM,
) -> ImportReport:
    """Commit ``tensors`` as the weights of the module that is attached as ``attached_as``, as ``step`` of ``run``.

    Holds a few chunks at a time, and what a tensor's own reader holds. Raises CaptureError if two names become one,
    CorruptSnapshot if the source is damaged or its boxes do not tile a tensor: then nothing is committed.
    """
    if not attached_as.isidentifier() or attached_as == "run":
        raise ConfigError("--as", attached_as, "give the name under which the model is attached, such as model")
    if step < 0:
        raise ConfigError("--step", step, "give 0 or more")
    check_algorithm(algorithm)
    names = {tensor.path: f"{attached_as}.{canonical(tensor.name)}" for tensor in tensors}
    check_distinct(names.values(), attached_as)
    aliases = tuple((names[t.path], names[t.tied_to]) for t in tensors if t.tied_to in names)
    held = [tensor for tensor in tensors if tensor.tied_to not in names]
    if without := [tensor.name for tensor in held if tensor.tied_to]:
        raise ConfigError("--part", without[0], "it is tied to a tensor outside of this part")

    attempt, mesh, point = attempt_name(GENERATION, 1), Mesh((("dp", 1),)), PointInTime(GENERATION, step)
    snapshot_id = new_snapshot_id(now_s, secrets.token_hex(4))
    prefix = attempt_prefix(run, step, snapshot_id, attempt)
    directory = prefix.split("/snapshots/", 1)[1]
    parts = _placed(held, names)
    table = table_of_pieces([piece for piece, _ in parts], f"{directory}/{pack_name(0)}", algorithm, aliases)

    check_coverage(table)
    store.check()
    store.put_if_absent(f"{run}/run.json", json.dumps({"schema": SCHEMA, "run": run, "created_at_s": now_s}).encode())
    files = []
    if len(table):
        writer = _PackWriter(table, parts)
        store.put_parts(f"{prefix}/{pack_name(0)}", writer.parts())
        table = replace(table, digest=writer.digests())
        files.append(FileRecord(pack_name(0), "pack", writer.nbytes, pack_digest(table)))
    else:
        table = replace(table, packs=())
    body = table.to_parquet_bytes()
    store.put(f"{prefix}/{table_name(0)}", body)
    files.append(
        FileRecord(
            table_name(0),
            "chunks",
            len(body),
            digest_text(algorithm, body),
            rows=len(table),
            ranks=(0,),
            written_bytes=table.total_bytes,
        )
    )
    objects = encode({"components": {attached_as: {"kind": "model"}}, "extra": {}})
    tree = digest_objects(objects, algorithm)
    index = SnapshotIndex(step, attempt, snapshot_id, mesh, point, table, ObjectTrees((tree,), {tree: objects}))
    report = ShareReport(attempt, 0, point, table.total_bytes, table_digest(table, objects), 0.0, {})
    ref = commit_remote(
        store,
        run,
        index,
        [report],
        files,
        versions=versions or {},
        has={},
        write_id=secrets.token_hex(16),
        committed_at_s=now_s,
    )
    SnapshotCatalog(store, run).open(ref)
    return ImportReport(ref, len(table.specs), len(aliases), table.total_bytes)


def _placed(tensors: Sequence[ForeignTensor], names: dict[tuple[str, ...], str]) -> list[tuple[Piece, ForeignPart]]:
    """Where each box goes in the pack."""
    found: list[tuple[Piece, ForeignPart]] = []
    at = 0
    for tensor in tensors:
        spec = TensorSpec(names[tensor.path], tensor.dtype, tensor.shape, tensor.itemsize)
        for part in tensor.parts:
            piece = Piece(spec, part.box, at)
            found.append((piece, part))
            at += -(-piece.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return found


class _PackWriter:
    """The bytes of a pack in order, hashed as they pass."""

    def __init__(self, table: ChunkTable, parts: Sequence[tuple[Piece, ForeignPart]]) -> None:
        self._table, self._parts = table, parts
        self._digest = algorithm_named(table.algorithm)
        self._found: list[bytes] = []
        self.nbytes = 0

    def parts(self) -> Iterator[Buffer]:
        """One buffer a chunk, and padding between tensors."""
        ranges = zip(self._table.byte_start.tolist(), self._table.nbytes.tolist())
        for piece, part in self._parts:
            if not piece.nbytes:
                continue
            end = piece.offset + piece.nbytes
            while self.nbytes < end:
                start, length = next(ranges)
                if start > self.nbytes:
                    yield bytes(start - self.nbytes)
                chunk = part.read(start - piece.offset, start - piece.offset + length)
                self._found.append(self._digest.digest(chunk))
                self.nbytes = start + length
                yield chunk

    def digests(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Of all chunks, in the order of the table."""
        return np.frombuffer(b"".join(self._found), np.uint8).reshape(len(self._found), self._digest.digest_bytes)
