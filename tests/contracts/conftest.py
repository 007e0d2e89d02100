"""Every kind of blob store, under one name."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.storage.blob_store import BlobStore
from elastic.storage.local_blobs import LocalBlobs
from elastic.storage.memory_blobs import MemoryBlobs


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    """An empty store of each kind in turn."""
    if request.param == "memory":
        made: BlobStore = MemoryBlobs.shared(uuid.uuid4().hex)
    else:
        made = LocalBlobs(tmp_path / "made" / "on the way")
    yield made
    made.close()
