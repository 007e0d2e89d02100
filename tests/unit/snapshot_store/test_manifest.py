from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elastic.errors import CorruptSnapshot, RestoreError
from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime
from elastic.snapshot import manifest as manifest_module
from elastic.snapshot.manifest import FileRecord, Manifest, SnapshotRef, manifest_digest

MANIFEST = Manifest(
    run="a-run",
    snapshot_id="0000000abc-1",
    attempt="g00001-000001",
    point=PointInTime(1, 40, 320, 320, 5120, (("optimizer", 40),), (("scheduler", 40),)),
    created_at_s=12.5,
    mesh=Mesh((("dp", 2), ("tp", 2))),
    versions={"torch": "2.13", "model": ""},
    has={"optimizer": True, "scaler": False},
    checksum="xxh3_128",
    files=(
        FileRecord("r00000.pack", "pack", 640, "tree:xxh3_128:00"),
        FileRecord("n00000.chunks.parquet", "chunks", 64, "xxh3_128:00", 3, (0, 1), ("000000000020-x/a/r00000.pack",)),
    ),
    parents={"000000000020-x": ("000000000020-x/a/r00000.pack",)},
    depth=1,
    writers=("node-a",),
    counts={"tensors": 2},
    metrics={"loss": 0.25},
)
REF = SnapshotRef("a-run", 40, "0000000abc-1", "g00001-000001", "sha256:00", "w1", 12.5, 1)


def test_a_manifest_and_a_marker_come_back_and_are_canonical() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert SnapshotRef.from_bytes(REF.to_bytes()) == REF
    shuffled = json.dumps(dict(reversed(json.loads(MANIFEST.to_bytes()).items()))).encode()
    assert Manifest.from_bytes(shuffled).to_bytes() == MANIFEST.to_bytes()
    assert manifest_digest(MANIFEST.to_bytes()) == manifest_digest(Manifest.from_bytes(shuffled).to_bytes())


def test_a_manifest_tells_the_moment_and_every_pack_it_needs() -> None:
    fields = json.loads(MANIFEST.to_bytes())
    assert (fields["step"], fields["data_cursor"], fields["tokens_seen"]) == (40, 320, 5120)
    assert MANIFEST.packs() == {"000000000040-0000000abc-1/g00001-000001/r00000.pack", "000000000020-x/a/r00000.pack"}


def test_a_manifest_of_a_newer_version_is_refused_with_the_cure() -> None:
    newer = json.dumps(json.loads(MANIFEST.to_bytes()) | {"schema": 99}).encode()
    with pytest.raises(RestoreError, match=r"99.*newer"):
        Manifest.from_bytes(newer)


def test_a_manifest_of_an_older_version_goes_through_its_converters(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = json.loads(MANIFEST.to_bytes()) | {"schema": 1}
    fields["old_name"] = fields.pop("checksum")
    monkeypatch.setattr(manifest_module, "SCHEMA", 3)
    monkeypatch.setitem(
        manifest_module.CONVERTERS, 1, lambda found: {**found, "checksum": found["old_name"], "schema": 2}
    )
    monkeypatch.setitem(manifest_module.CONVERTERS, 2, lambda found: {**found, "schema": 3})
    assert Manifest.from_bytes(json.dumps(fields).encode()) == MANIFEST


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": "../elsewhere"},
        {"run": "a/b"},
        {"snapshot_id": ""},
        {"parents": {"..": []}},
        {"parents": {"x": ["../../etc/passwd"]}},
        {"files": [{"name": "../x", "kind": "pack", "nbytes": 1, "digest": "a:b"}]},
        {"files": [{"name": "x", "kind": "pack", "nbytes": 1, "digest": ""}]},
        {"files": [{"name": "x"}]},
        {"point": {"step": 1}},
        {"point": {"step": 1, "generation": 1, "surprise": 2}},
        {"mesh": "dp4"},
        {"schema": "one"},
    ],
)
def test_a_manifest_that_lacks_something_or_leaves_its_directory_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CorruptSnapshot):
        Manifest.from_bytes(json.dumps(json.loads(MANIFEST.to_bytes()) | change).encode())


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'"x"', b"\x80\x04."])
def test_other_bytes_are_neither_manifest_nor_marker(body: bytes) -> None:
    for read in (Manifest.from_bytes, SnapshotRef.from_bytes):
        with pytest.raises(CorruptSnapshot):
            read(body)


def test_a_marker_that_leaves_its_directory_is_refused() -> None:
    with pytest.raises(CorruptSnapshot, match="outside"):
        SnapshotRef.from_bytes(replace(REF, attempt="../../x").to_bytes())
