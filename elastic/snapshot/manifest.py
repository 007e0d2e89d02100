"""The manifest of a committed snapshot, and the marker that commits it: canonical JSON with a schema version. Pure.

The manifest names every file with size and digest; the marker holds the digest of the manifest. So whoever trusts the
marker can check everything else. Neither is ever changed; older schemas are read through ``CONVERTERS``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic.errors import CorruptSnapshot, RestoreError, StorageError
from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime
from elastic.snapshot.held_share import point_from_json
from elastic.snapshot.object_names import attempt_prefix, check_pack, check_part, snapshot_directory, snapshots_prefix

SCHEMA = 1

CONVERTERS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""From a manifest of schema n to one of schema n + 1, keyed by n."""

VERSIONS = (
    "elastic",
    "torch",
    "python",
    "ray",
    "model",
    "tokenizer",
    "code",
    "container",
    "dependencies",
    "data",
    "optimizer",
    "commit",
)
"""What a snapshot was made with; a version that is not known is recorded as the empty string."""

PRESENCE = ("optimizer", "scheduler", "scaler", "rng")
"""Kinds of state of which a snapshot says whether it holds them."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of an attempt. ``name`` is relative to the attempt's directory; ``kind`` is pack, chunks, tensors or
    objects. The rest is told of chunk tables only: rows, ranks whose shares it describes, packs of older snapshots that
    it refers to (relative to ``snapshots/``), bytes in packs of this attempt and bytes referred to."""

    name: str
    kind: str
    nbytes: int
    digest: str
    rows: int = 0
    ranks: tuple[int, ...] = ()
    referenced: tuple[str, ...] = ()
    written_bytes: int = 0
    referenced_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a committed snapshot is: see FORMAT.md for each field."""

    run: str
    snapshot_id: str
    attempt: str
    point: PointInTime
    created_at_s: float
    mesh: Mesh
    versions: Mapping[str, str]
    has: Mapping[str, bool]
    checksum: str
    files: tuple[FileRecord, ...]
    parents: Mapping[str, tuple[str, ...]]
    """Directories of older snapshots to the packs of theirs that are referred to, relative to ``snapshots/``."""
    depth: int
    writers: tuple[str, ...]
    counts: Mapping[str, int]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.point.step

    @property
    def directory(self) -> str:
        """Directory of the snapshot under ``snapshots/``."""
        return snapshot_directory(self.point.step, self.snapshot_id)

    def packs(self) -> set[str]:
        """Every pack that this snapshot needs, its own and its parents', relative to ``snapshots/``."""
        own = {f"{self.directory}/{self.attempt}/{record.name}" for record in self.files if record.kind == "pack"}
        return own.union(*self.parents.values())

    def to_bytes(self) -> bytes:
        """Canonical JSON: the same manifest, the same bytes."""
        fields = asdict(self) | {
            "schema": SCHEMA,
            "step": self.point.step,
            "generation": self.point.generation,
            "data_cursor": self.point.data_cursor,
            "tokens_seen": self.point.tokens_seen,
            "mesh": self.mesh.axes,
        }
        return canonical_json(fields)

    @staticmethod
    def from_bytes(data: bytes, where: str = "") -> Manifest:
        """Inverse of ``to_bytes``, also of older schemas. Raises CorruptSnapshot if it is no manifest or names a file
        outside of the run, RestoreError if it was written by a newer version."""
        try:
            fields = _upgrade(json.loads(data), where)
            return Manifest(
                run=check_part(fields["run"]),
                snapshot_id=check_part(fields["snapshot_id"]),
                attempt=check_part(fields["attempt"]),
                point=point_from_json(fields["point"]),
                created_at_s=float(fields["created_at_s"]),
                mesh=Mesh(tuple((str(axis), int(size)) for axis, size in fields["mesh"])),
                versions={str(key): str(value) for key, value in fields["versions"].items()},
                has={str(key): bool(value) for key, value in fields["has"].items()},
                checksum=str(fields["checksum"]),
                files=tuple(map(_file_record, fields["files"])),
                parents={
                    check_part(directory): tuple(map(check_pack, packs))
                    for directory, packs in fields["parents"].items()
                },
                depth=int(fields["depth"]),
                writers=tuple(map(str, fields["writers"])),
                counts={str(key): int(value) for key, value in fields["counts"].items()},
                metrics={str(key): float(value) for key, value in fields["metrics"].items()},
            )
        except StorageError as error:
            raise CorruptSnapshot(f"the manifest names a file outside of the run: {error.where}", where) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptSnapshot(f"not a manifest: {type(error).__name__}: {error}", where) from error


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """One committed snapshot, as its marker tells: where it is, and the digest that its manifest must have."""

    run: str
    step: int
    snapshot_id: str
    attempt: str
    manifest_digest: str
    write_id: str
    committed_at_s: float
    depth: int = 0

    @property
    def directory(self) -> str:
        """Directory under ``snapshots/``; unique in the run."""
        return snapshot_directory(self.step, self.snapshot_id)

    @property
    def prefix(self) -> str:
        """Key of the directory of the committed attempt."""
        return attempt_prefix(self.run, self.step, self.snapshot_id, self.attempt)

    @property
    def snapshots(self) -> str:
        """Key prefix that pack names are relative to."""
        return snapshots_prefix(self.run)

    def to_bytes(self) -> bytes:
        """The marker."""
        return canonical_json(asdict(self) | {"schema": SCHEMA})

    @staticmethod
    def from_bytes(data: bytes, where: str = "") -> SnapshotRef:
        """Inverse of ``to_bytes``; CorruptSnapshot if it is no marker."""
        try:
            fields = json.loads(data)
            fields.pop("schema")
            ref = SnapshotRef(**fields)
            for part in (ref.run, ref.attempt, ref.directory):
                check_part(part)
            return ref
        except StorageError as error:
            raise CorruptSnapshot(f"the marker names a place outside of the run: {error.where}", where) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptSnapshot(f"not a marker: {type(error).__name__}: {error}", where) from error


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces; ValueError for nan and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict).encode()


def manifest_digest(data: bytes) -> str:
    """Digest of a manifest as its marker holds it; always sha256, whatever the chunks use."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _upgrade(fields: dict[str, Any], where: str) -> dict[str, Any]:
    schema = fields["schema"]
    if not isinstance(schema, int) or schema < 1:
        raise ValueError(f"schema {schema!r}")
    if schema > SCHEMA:
        raise RestoreError(
            f"the snapshot has schema {schema}, this version reads up to {SCHEMA}", where, "install a newer ray-elastic"
        )
    while schema < SCHEMA:
        fields = CONVERTERS[schema](fields)
        schema += 1
    return fields


def _file_record(fields: dict[str, Any]) -> FileRecord:
    known = dict(fields)
    for name in ("ranks", "referenced"):
        known[name] = tuple(known[name])
    record = FileRecord(**known)
    check_part(record.name)
    for pack in record.referenced:
        check_pack(pack)
    if record.nbytes < 0 or ":" not in record.digest:
        raise ValueError(f"file {record.name} has no size or no digest")
    return record
