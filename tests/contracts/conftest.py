"""Every kind of blob store, under one name."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.seaweed import S3Server, seaweed

from elastic.storage.blob_store import BlobStore
from elastic.storage.local_blobs import LocalBlobs
from elastic.storage.memory_blobs import MemoryBlobs
from elastic.storage.remote_blobs import RemoteBlobs


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A running S3 server, with the AWS_* variables of this process set for it. The bucket is shared by all tests."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    return s3_server


class StandInForGoogle(MemoryFileSystem):  # type: ignore[misc]
    """The service behind gs://, as far as the contract sees it: fsspec's memory, with a create that is one step."""

    protocol = "gs"
    _one_at_a_time = threading.Lock()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        with self._one_at_a_time:
            super().pipe_file(path, bytes(value), mode=mode, **options)


@pytest.fixture
def google() -> str:
    """An empty place of a gs:// service."""
    fsspec.register_implementation("gs", StandInForGoogle, clobber=True)
    return f"gs://bucket/{uuid.uuid4().hex}"


@pytest.fixture(params=["memory", "local", "s3", "gs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    """An empty store of each kind in turn."""
    if request.param == "memory":
        made: BlobStore = MemoryBlobs.shared(uuid.uuid4().hex)
    elif request.param == "local":
        made = LocalBlobs(tmp_path / "made" / "on the way")
    elif request.param == "s3":
        bucket = request.getfixturevalue("s3_bucket").bucket
        made = RemoteBlobs(f"s3://{bucket}/{uuid.uuid4().hex}/runs")
    else:
        made = RemoteBlobs(request.getfixturevalue("google"))
    yield made
    made.close()
