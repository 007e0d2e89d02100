"""The contract between snapshots and any place that keeps bytes by name.

A key is a relative POSIX path under the store's root. Every object is written once and never changed; the only key
that may be replaced is a hint (``put`` overwrites). What the contract promises is what commit needs and no more:
a returned write is durable, a conditional write has one winner, a listing after a write sees it.

It refuses to promise: atomic groups of keys, renames, that a failed write left nothing behind, and that one key may
be the directory of another (``a`` beside ``a/b``). An object that a failed write left is harmless, because nothing is
read that a committed manifest does not name.

Every store may be used from several threads at once, and pickled to another process, where it opens anew.
"""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from elastic.errors import StorageError

Buffer = bytes | bytearray | memoryview

LEFTOVER_PREFIX = ".part-"
"""Names that begin so belong to writes that have not ended; no key may."""

READ_BLOCK_BYTES = 8 << 20


class PutOutcome(Enum):
    """What a conditional write came to."""

    WRITTEN = "written"
    REFUSED = "refused"
    """The key exists: another writer was first."""
    UNKNOWN = "unknown"
    """The answer was lost: the caller reads the key back and compares its write id."""


def check_key(key: str) -> str:
    """``key`` itself, if it stays under a store's root on every kind of store; else StorageError.

    Refused: empty, absolute, ``.`` and ``..``, an empty segment, a backslash, NUL and other control characters, text
    that is not valid Unicode, and names reserved for unfinished writes.
    """
    segments = key.split("/")
    bad = (
        any(segment in ("", ".", "..") or segment.startswith(LEFTOVER_PREFIX) for segment in segments)
        or "\\" in key
        or any(ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in key)
    )
    if bad:
        raise StorageError("this name cannot be used in a store", repr(key), "use a relative path without '..'")
    return key


def flat(data: Buffer) -> memoryview:
    """``data`` as one run of bytes, not copied."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def too_short(where: str, size_bytes: int, start: int, end: int) -> StorageError:
    """What a read past the end of an object raises on every kind of store."""
    return StorageError(
        f"the object has {size_bytes} bytes, but bytes {start} to {end} were wanted",
        where,
        "it was cut short or is another object: restore from an older snapshot",
    )


def no_conditional_write(url: str) -> StorageError:
    """Why a store cannot hold commits."""
    return StorageError(
        "this store has no conditional write, so two writers could overwrite each other's commit",
        url,
        "use a directory or an object store that has one: s3://, gs:// or abfs://",
    )


class BlobStore(ABC):
    """A durable map from names to bytes.

    All methods raise StorageError (what, where, cure) for what the place itself refuses: no permission, full, no such
    bucket, no answer after the retries, a key that leaves the root. ``get`` and its kin raise KeyError for a key that
    is not there.
    """

    url: str
    """What the user named, without secrets; for messages."""
    range_bytes = 8 << 20
    """What one read of a large object should bring: enough to be worth its round trip."""

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write ``data`` under ``key``, durable on return, whole or not at all to any reader."""

    @abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> PutOutcome:
        """Write ``data`` only if ``key`` does not exist. Of many concurrent callers exactly one gets WRITTEN.

        StorageError means that this call has written nothing that lasts. Whatever is in doubt is UNKNOWN: also that
        the key holds just these bytes already, where a network may have sent the request twice.
        """

    @abstractmethod
    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """The bytes from ``start``, ``length`` of them or to the end. A short object raises StorageError."""

    @abstractmethod
    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start``, without a copy where the place allows it.

        A short object raises StorageError; what ``buffer`` holds then is undefined.
        """

    def scatter(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        """As ``read_into``, of the bytes from ``start`` on into ``buffers``, one after another."""
        if len(buffers) == 1:
            return self.read_into(key, start, buffers[0])
        joined = memoryview(bytearray(sum(buffer.nbytes for buffer in buffers)))
        self.read_into(key, start, joined)
        for buffer in buffers:
            buffer[:], joined = joined[: buffer.nbytes], joined[buffer.nbytes :]

    def mapped(self, key: str, start: int, length: int) -> memoryview | None:
        """The bytes as they lie in this machine's memory, to be looked at soon; None where they must be read."""
        return None

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes of the object under ``key``."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[str]:
        """All keys that begin with ``prefix``, sorted. A prefix that nothing has gives nothing."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove ``key``, durable on return; a key that is not there is no error."""

    def put_parts(self, key: str, parts: Iterable[Buffer]) -> None:
        """As ``put``, of the bytes of all ``parts`` in order, without holding them all where the place allows it.

        The buffer of a part may be reused once the next one is asked for. An error raised by ``parts`` comes through
        and leaves no object.
        """
        self.put(key, b"".join(bytes(part) for part in parts))

    def put_file(self, key: str, path: str | os.PathLike[str]) -> None:
        """As ``put``, of the content of the local file ``path``, without holding it all where the place allows it."""
        self.put_parts(key, _blocks_of(path))

    def exists(self, key: str) -> bool:
        """Whether ``key`` is there."""
        try:
            self.size(key)
        except KeyError:
            return False
        return True

    def check(self) -> None:
        """Prove, once and at start, that this place can be written, read and refuses a second writer; or raise."""
        key = f"check-{uuid.uuid4().hex}"
        body = key.encode()
        first = self.put_if_absent(key, body)
        found = self.get(key) if first is not PutOutcome.REFUSED else b""
        try:
            second = self.put_if_absent(key, b"a second writer")
            listed = list(self.list(key))
        finally:
            self.delete(key)
        if found != body or first is PutOutcome.REFUSED or second is PutOutcome.WRITTEN:
            raise no_conditional_write(self.url)
        if listed != [key]:
            raise StorageError("a listing does not show what was just written", self.url, "use a consistent store")

    def sweep_leftovers(self, older_than_s: float) -> int:
        """Remove what writes that never ended left behind, if last touched ``older_than_s`` ago. How many were."""
        return 0

    def close(self) -> None:  # noqa: B027
        """Give up connections. The store may be used again and then opens anew."""


def _blocks_of(path: str | os.PathLike[str]) -> Iterator[memoryview]:
    block = memoryview(bytearray(READ_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            yield block[:count]


def open_store(url: str) -> BlobStore:
    """The store that ``url`` names: a local path or ``file://``, ``memory://NAME``, ``s3://BUCKET/PREFIX``, or any
    other fsspec URL that has a conditional write. Raises ConfigError for a scheme that is not known.

    Nothing is touched yet: call ``check`` to learn whether the place can be used.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        from elastic.storage.local_blobs import LocalBlobs

        return LocalBlobs(rest if separator else url)
    if scheme == "memory":
        from elastic.storage.memory_blobs import MemoryBlobs

        return MemoryBlobs.shared(rest)
    from elastic.storage.remote_blobs import RemoteBlobs

    return RemoteBlobs(url)
