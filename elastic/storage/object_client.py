"""One request to a remote store at a time: what RemoteBlobs asks of a library, and how any fsspec one answers.

A client tries once and raises what its library raises; retries and wording are RemoteBlobs'. Paths are absolute in the
store (``bucket/key``).
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from elastic.storage.blob_store import Buffer, flat

Result = TypeVar("Result")
Ask = Callable[[Callable[[], Result]], Result]


class ObjectClient(ABC):
    """The requests of an object store. Any method may be called from any thread."""

    @abstractmethod
    def create(self, path: str, body: bytes | bytearray) -> None:
        """Write if absent; what the library raises for a path that exists must read as TAKEN."""

    @abstractmethod
    def write(self, path: str, body: bytes | bytearray) -> None: ...

    @abstractmethod
    def write_parts(self, path: str, parts: Iterable[Buffer], ask: Ask[Any]) -> None:
        """Write an object that may be larger than memory; each request goes through ``ask``, which tries again."""

    @abstractmethod
    def read(self, path: str, start: int, end: int | None) -> bytes:
        """Bytes ``start`` to ``end``, fewer if the object ends before."""

    @abstractmethod
    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``start``; how many bytes there were for it."""

    @abstractmethod
    def size(self, path: str) -> int: ...

    @abstractmethod
    def names(self, prefix: str) -> Iterator[str]:
        """All paths that begin with ``prefix``, in any order; fresh from the store."""

    @abstractmethod
    def delete(self, path: str) -> None: ...

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        """Give up multipart uploads that began ``older_than_s`` ago and never ended. How many."""
        return 0

    @abstractmethod
    def close(self) -> None: ...


class FsspecClient(ObjectClient):
    """Any fsspec file system, by the calls that all of them share."""

    def __init__(self, scheme: str, options: Mapping[str, Any]) -> None:
        import fsspec  # type: ignore[import-untyped]

        self._files = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **options)

    def create(self, path: str, body: bytes | bytearray) -> None:
        self._files.pipe_file(path, body, mode="create")

    def write(self, path: str, body: bytes | bytearray) -> None:
        self._files.pipe_file(path, body)

    def write_parts(self, path: str, parts: Iterable[Buffer], ask: Ask[Any]) -> None:
        # By way of a file: a stream of fsspec's that fails midway may leave the part it had under the name.
        with tempfile.NamedTemporaryFile() as spool:
            for part in parts:
                spool.write(flat(part))
            spool.flush()
            ask(lambda: self._files.put_file(spool.name, path))

    def read(self, path: str, start: int, end: int | None) -> bytes:
        return bytes(self._files.cat_file(path, start=start or None, end=end))

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        body = self.read(path, start, start + buffer.nbytes)
        buffer[: len(body)] = body
        return len(body)

    def size(self, path: str) -> int:
        self._files.invalidate_cache(path)
        status = self._files.info(path)
        if status["type"] != "file":
            raise FileNotFoundError(path)
        return int(status["size"])

    def names(self, prefix: str) -> Iterator[str]:
        self._files.invalidate_cache()
        found: list[str] = self._files.find(prefix.rpartition("/")[0])
        return (name.lstrip("/") for name in found)

    def delete(self, path: str) -> None:
        self._files.rm_file(path)

    def close(self) -> None:
        pass
