"""Which snapshots a store holds, and what is in them: by markers and digests alone, without torch, Ray or the job.

readable ⟺ the marker exists ∧ the manifest has the marker's digest ∧ every file and every chunk has its checksum.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.errors import CorruptSnapshot, RestoreError
from elastic.snapshot.blob_copy import BlobCopy
from elastic.snapshot.checksum import check_digest
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.index import ObjectTrees, SnapshotIndex
from elastic.snapshot.layout import TensorSpec
from elastic.snapshot.manifest import FileRecord, Manifest, SnapshotRef, manifest_digest
from elastic.snapshot.object_names import MARKER, QUARANTINED, latest_key, parse_key, snapshots_prefix
from elastic.snapshot.quarantine import reason_of
from elastic.snapshot.sources import VerifiedSource
from elastic.storage.blob_store import BlobStore

READ_THREADS = 8

_NUMPY = {
    "float64": "f8",
    "float32": "f4",
    "float16": "f2",
    "int64": "i8",
    "int32": "i4",
    "int16": "i2",
    "int8": "i1",
    "uint64": "u8",
    "uint32": "u4",
    "uint16": "u2",
    "uint8": "u1",
    "bool": "?",
    "complex64": "c8",
    "complex128": "c16",
}


class SnapshotCatalog:
    """The committed snapshots of one run. Reads only; a snapshot in ``quarantined`` is never chosen. ``read_before``
    holds what ``note`` has read, by key: that is not read again."""

    def __init__(
        self,
        store: BlobStore,
        run: str,
        quarantined: Collection[str] = (),
        read_before: dict[str, bytes] | None = None,
    ) -> None:
        self.store, self.run, self._read_before = store, run, read_before
        self.quarantined: dict[str, str] = dict.fromkeys(quarantined, "it failed to restore before")
        """Directory of a snapshot to the reason why it is not used."""
        self.failed: dict[str, str] = {}
        """Directory of a snapshot in lasting quarantine to the reason, as ``list`` found it: a run failed to restore it
        again and again. It is listed, and chosen only by name."""

    def list(self) -> list[SnapshotRef]:
        """Every committed snapshot, newest first (by step, then by time of commit). A marker that cannot be read is
        put into ``quarantined`` and left out."""
        names = [(key, parse_key(self.run, key)) for key in self.store.list(snapshots_prefix(self.run))]
        with ThreadPoolExecutor(READ_THREADS) as threads:
            markers = [key for key, name in names if name is not None and name.rest == MARKER]
            refs = [ref for ref in threads.map(self._marker, markers) if ref is not None]
        for key, name in names:
            if name is not None and name.rest == QUARANTINED:
                with contextlib.suppress(KeyError):  # a check that found it whole was faster
                    self.failed[name.directory] = reason_of(self.store.get(key))
        return sorted(refs, key=lambda ref: (ref.step, ref.committed_at_s, ref.snapshot_id), reverse=True)

    def restorable(self) -> list[SnapshotRef]:
        """As ``list``, without those in quarantine."""
        return [ref for ref in self.list() if ref.directory not in self.failed]

    def find(self, step: int) -> SnapshotRef | None:
        """The newest committed snapshot of exactly this step."""
        return next((ref for ref in self.list() if ref.step == step), None)

    def newest_good(self, at_most_step: int | None = None) -> tuple[SnapshotRef, SnapshotIndex] | None:
        """The newest snapshot whose marker, manifest, files and coverage are good, with its index; None if there is
        none. One that is not good is quarantined, with the reason, and the next older one is tried."""
        for ref in self.restorable():
            if ref.directory in self.quarantined or (at_most_step is not None and ref.step > at_most_step):
                continue
            try:
                return ref, self.open(ref)
            except RestoreError as error:
                self.quarantined[ref.directory] = str(error)
        return None

    def rebuild_latest(self) -> SnapshotRef | None:
        """Write ``latest.json`` anew from the markers. Returns what it names."""
        refs = self.list()
        if refs:
            self.store.put(latest_key(self.run), refs[0].to_bytes())
        return refs[0] if refs else None

    def manifest(self, ref: SnapshotRef) -> Manifest:
        """The manifest, checked against the marker. Raises CorruptSnapshot."""
        key = f"{ref.prefix}/manifest.json"
        body = self._get(key, self.note)
        if manifest_digest(body) != ref.manifest_digest:
            raise CorruptSnapshot("the manifest does not have the digest of the marker", key, _CURE)
        manifest = Manifest.from_bytes(body, key)
        if (manifest.run, manifest.directory, manifest.attempt) != (ref.run, ref.directory, ref.attempt):
            raise CorruptSnapshot("the manifest belongs to another snapshot", key, _CURE)
        return manifest

    def open(self, ref: SnapshotRef) -> SnapshotIndex:
        """The index, after checking manifest, the digest of every table and object file, the size of every pack, and
        that the chunks tile every tensor. Chunks are checked when they are read. Raises CorruptSnapshot."""
        manifest = self.manifest(ref)
        tables = [record for record in manifest.files if record.kind == "chunks"]
        objects = [record for record in manifest.files if record.kind == "objects"]
        if not tables or len(objects) != 1:
            raise CorruptSnapshot("the manifest lacks a chunk table or the objects", ref.prefix, _CURE)
        with ThreadPoolExecutor(READ_THREADS) as threads:
            trees = threads.submit(self._objects, ref, objects[0])
            others = [record for record in manifest.files if record.kind not in ("pack", "chunks", "objects")]
            checked = [threads.submit(self._file, ref, record) for record in others]
            table = ChunkTable.concat(list(threads.map(lambda record: self._table(ref, record), tables)))
            for future in checked:
                future.result()
            self._check_rows(
                ref, manifest, table, list(threads.map(self._size, map(ref.snapshots.__add__, table.packs)))
            )
            index = SnapshotIndex(
                manifest.step,
                manifest.attempt,
                manifest.snapshot_id,
                manifest.mesh,
                manifest.point,
                table,
                trees.result(),
                manifest.versions,
                json.loads(manifest.to_bytes()),
            )
        index.check_coverage()
        return index

    def source(self, ref: SnapshotRef, threads: int = 4) -> VerifiedSource:
        """Where the chunks of ``ref`` are read from: ranged, coalesced, parallel, verified."""
        return VerifiedSource([BlobCopy(self.store, ref.snapshots, threads)])

    def load(self, ref: SnapshotRef, names: Iterable[str] | None = None) -> dict[str, npt.NDArray[Any]]:
        """Whole tensors as numpy arrays, by name, aliases too (the same array). Dtypes that numpy lacks (bfloat16,
        float8) come as unsigned integers of their size. Raises KeyError for a name that the snapshot does not hold."""
        index = self.open(ref)
        table, aliases = index.table, dict(index.table.aliases)
        ids = {spec.name: i for i, spec in enumerate(table.specs)}
        wanted = list(names) if names is not None else [*ids, *aliases]
        held = sorted({ids[aliases.get(name, name)] for name in wanted})
        arrays = {i: np.empty(table.specs[i].shape, numpy_dtype(table.specs[i])) for i in held}
        source = self.source(ref)
        rows = np.flatnonzero(np.isin(table.tensor_id, held))
        for start in range(0, len(rows), _LOAD_ROWS):
            part = rows[start : start + _LOAD_ROWS]
            for row, chunk in zip(part.tolist(), source.read(table, part)):
                target, box = arrays[int(table.tensor_id[row])], table.box(row)
                cut = box.within(table.specs[table.tensor_id[row]].box)
                target[cut] = np.frombuffer(chunk, target.dtype).reshape(box.shape)
        return {name: arrays[ids[aliases.get(name, name)]] for name in wanted}

    def _marker(self, key: str) -> SnapshotRef | None:
        parsed = parse_key(self.run, key)
        if parsed is None or parsed.rest != MARKER:
            return None
        try:
            ref = SnapshotRef.from_bytes(self.note(key), key)
            if (ref.run, ref.directory) != (self.run, parsed.directory):
                raise CorruptSnapshot("the marker belongs to another snapshot", key)
            return ref
        except KeyError:
            return None  # Retention was faster.
        except CorruptSnapshot as error:
            self.quarantined[parsed.directory] = str(error)
            return None

    def note(self, key: str) -> bytes:
        """A small object that does not change any more. Raises KeyError."""
        if self._read_before is None:
            return self.store.get(key)
        if (body := self._read_before.get(key)) is None:
            body = self._read_before[key] = self.store.get(key)
        return body

    def _get(self, key: str, read: Callable[[str], bytes] | None = None) -> bytes:
        try:
            return (read or self.store.get)(key)
        except KeyError:
            raise CorruptSnapshot("a file of a committed snapshot is not there", key, _CURE) from None

    def _file(self, ref: SnapshotRef, record: FileRecord) -> bytes:
        key = f"{ref.prefix}/{record.name}"
        body = self._get(key)
        if len(body) != record.nbytes:
            raise CorruptSnapshot(f"the file has {len(body)} bytes instead of {record.nbytes}", key, _CURE)
        check_digest(record.digest, body, key)
        return body

    def _table(self, ref: SnapshotRef, record: FileRecord) -> ChunkTable:
        table = ChunkTable.from_parquet_bytes(self._file(ref, record))
        if len(table) != record.rows:
            raise CorruptSnapshot(f"{record.name} has {len(table)} rows instead of {record.rows}", ref.prefix, _CURE)
        return table

    def _objects(self, ref: SnapshotRef, record: FileRecord) -> ObjectTrees:
        body = self._file(ref, record)
        try:
            fields = json.loads(body)
            trees = {str(digest): str(text).encode() for digest, text in fields["trees"].items()}
            ranks = tuple(map(str, fields["ranks"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptSnapshot(f"not the objects of a snapshot: {error}", f"{ref.prefix}/{record.name}") from error
        for digest, tree in trees.items():
            check_digest(digest, tree, f"{ref.prefix}/{record.name}")
        if missing := set(ranks) - set(trees):
            raise CorruptSnapshot(f"the tree {missing.pop()} is missing", f"{ref.prefix}/{record.name}", _CURE)
        return ObjectTrees(ranks, trees)

    def _size(self, key: str) -> int:
        try:
            return self.store.size(key)
        except KeyError:
            return -1

    def _check_rows(self, ref: SnapshotRef, manifest: Manifest, table: ChunkTable, sizes: Sequence[int]) -> None:
        if table.algorithm != manifest.checksum:
            raise CorruptSnapshot("the chunk tables use another checksum than the manifest says", ref.prefix, _CURE)
        needed = np.zeros(len(table.packs), np.int64)
        np.maximum.at(needed, table.pack_id, table.byte_start + table.nbytes)
        known = manifest.packs()
        for pack, size, need in zip(table.packs, sizes, needed.tolist()):
            if pack not in known:
                raise CorruptSnapshot(f"the chunk tables name {pack}, which the manifest does not", ref.prefix, _CURE)
            if size < need:
                state = "is not there" if size < 0 else f"has {size} bytes, {need} are needed"
                raise CorruptSnapshot(f"the pack {state}", f"{ref.snapshots}{pack}", _CURE)


def numpy_dtype(spec: TensorSpec) -> np.dtype[Any]:
    """The numpy dtype of a tensor's values, or of its bits where numpy has none."""
    return np.dtype(_NUMPY.get(spec.dtype, f"u{spec.itemsize}"))


_CURE = "restore from an older snapshot"
_LOAD_ROWS = 512
