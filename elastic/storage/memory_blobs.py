"""A store in the memory of one process: for tests, and for runs that need not outlive their process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from elastic.storage.blob_store import BlobStore, Buffer, PutOutcome, check_key, flat, too_short

_shared: dict[str, MemoryBlobs] = {}
_shared_lock = threading.Lock()


class MemoryBlobs(BlobStore):
    """Blobs in a dict. Durable only in so far as the process lives."""

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self._name = name
        self._blobs: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def shared(cls, name: str) -> MemoryBlobs:
        """The one store of this process that is called ``name``."""
        with _shared_lock:
            return _shared.setdefault(name, cls(name))

    def __reduce__(self) -> tuple[object, ...]:
        return (MemoryBlobs.shared, (self._name,))

    def put(self, key: str, data: Buffer) -> None:
        check_key(key)
        body = bytes(data)
        with self._lock:
            self._blobs[key] = body

    def put_if_absent(self, key: str, data: Buffer) -> PutOutcome:
        check_key(key)
        body = bytes(data)
        with self._lock:
            if key in self._blobs:
                return PutOutcome.REFUSED
            self._blobs[key] = body
        return PutOutcome.WRITTEN

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return bytes(self._range(key, start, length))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        target = flat(buffer)
        target[:] = self._range(key, start, target.nbytes)

    def size(self, key: str) -> int:
        return len(self._blobs[check_key(key)])

    def list(self, prefix: str) -> Iterator[str]:
        with self._lock:
            keys = sorted(key for key in self._blobs if key.startswith(prefix))
        return iter(keys)

    def delete(self, key: str) -> None:
        with self._lock:
            self._blobs.pop(check_key(key), None)

    def _range(self, key: str, start: int, length: int | None) -> memoryview:
        blob = memoryview(self._blobs[check_key(key)])
        end = blob.nbytes if length is None else start + length
        if start > blob.nbytes or end > blob.nbytes:
            raise too_short(f"{self.url}/{key}", blob.nbytes, start, end)
        return blob[start:end]
