"""A store over the network: S3 and its kin, and other fsspec schemes whose service has a conditional write.

All retries are here, so that it is known how often a write was sent: a conditional write that was sent more than once,
by us or by something on the way, may be refused because of itself. So a refusal is believed only if the key holds
other bytes than ours; else the outcome is UNKNOWN, and the caller compares write ids.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from elastic.errors import ConfigError, StorageError
from elastic.storage.answers import NO_BUCKET, UNSUPPORTED, Answer, Kind, read_answer
from elastic.storage.blob_store import (
    BlobStore,
    Buffer,
    PutOutcome,
    check_key,
    flat,
    no_conditional_write,
    too_short,
)
from elastic.storage.object_client import FsspecClient, ObjectClient
from elastic.storage.retry import Retry

Result = TypeVar("Result")

S3_SCHEMES = ("s3", "s3a")
CONDITIONAL_SCHEMES = (*S3_SCHEMES, "gs", "gcs", "abfs", "abfss", "az")
"""Whose service itself refuses a second writer. fsspec's own ``mode="create"`` looks first and writes then, for all
others, which two writers can pass at once."""
SINGLE_WRITE_BYTES = 32 << 20
"""Larger objects go in parts."""


class _Told(Exception):
    """The last answer of the store, when it was not success."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self.answer = answer


class RemoteBlobs(BlobStore):
    """Blobs under ``scheme://bucket/prefix``. Connections are opened on first use, anew in each process.

    ``options`` go to the fsspec file system; without them address and keys come from the provider's own environment
    variables and files, for S3 the AWS_* ones. Raises ConfigError for a URL that names no bucket or holds a secret.
    """

    def __init__(self, url: str, *, retry: Retry | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._scheme, _, rest = url.partition("://")
        if "@" in rest.partition("/")[0] and self._scheme in S3_SCHEMES:
            shown = f"{self._scheme}://…@{rest.partition('@')[2]}"
            raise ConfigError("storage_path", shown, "leave keys out of the URL: set them in the environment")
        self._base = rest.strip("/")
        self.url = f"{self._scheme}://{self._base}"
        if not self._base:
            raise ConfigError("storage_path", url, f"name a bucket: {self._scheme or 's3'}://BUCKET/PREFIX")
        _known(self._scheme, url)
        try:
            check_key(self._base)
        except StorageError as error:
            raise ConfigError("storage_path", url, error.cure) from None
        self._retry = retry or Retry()
        self._options = dict(options or {})
        self._opened: tuple[int, ObjectClient] | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (_again, (self.url, self._retry, self._options))

    # ---- writing

    def put(self, key: str, data: Buffer) -> None:
        view = flat(data)
        if view.nbytes > SINGLE_WRITE_BYTES:
            return self.put_parts(key, [view])
        path, client, body = self._path(key), self._client(), _body(data)
        self._write(key, lambda: client.write(path, body))

    def put_parts(self, key: str, parts: Iterable[Buffer]) -> None:
        path, client = self._path(key), self._client()
        client.write_parts(path, parts, lambda request: self._write(key, request))

    def put_if_absent(self, key: str, data: Buffer) -> PutOutcome:
        path, client, body = self._path(key), self._client(), _body(data)
        in_doubt = False

        def create() -> None:
            nonlocal in_doubt
            try:
                client.create(path, body)
            except Exception as error:
                in_doubt = in_doubt or read_answer(error).kind is Kind.LOST
                raise

        try:
            self._ask(create)
        except _Told as told:
            if told.answer.kind is Kind.TAKEN:
                return PutOutcome.UNKNOWN if self._holds(key, body) else PutOutcome.REFUSED
            if told.answer is UNSUPPORTED:
                raise no_conditional_write(self.url) from None
            if in_doubt:
                return PutOutcome.UNKNOWN
            raise self._said(told.answer, key) from None
        return PutOutcome.WRITTEN

    def _holds(self, key: str, body: bytes | bytearray) -> bool:
        """Whether ``key`` has just this content, or may have: the store does not say."""
        try:
            return self.size(key) == len(body) and self.get(key) == body
        except (KeyError, StorageError):
            return True

    def delete(self, key: str) -> None:
        path, client = self._path(key), self._client()
        try:
            self._ask(lambda: client.delete(path))
        except _Told as told:
            if told.answer.kind is not Kind.MISSING:
                raise self._said(told.answer, key) from None

    # ---- reading

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        path, client = self._path(key), self._client()
        if length == 0:
            self._check_range(key, start, start)
            return b""
        end = None if length is None else start + length
        try:
            body = self._read(key, lambda: client.read(path, start, end))
        except _Told:
            self._check_range(key, start, start if end is None else end)
            return b""
        if end is not None and len(body) < end - start:
            raise too_short(f"{self.url}/{key}", start + len(body), start, end)
        if not body and start:
            self._check_range(key, start, start)
        return body

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        path, client, target = self._path(key), self._client(), flat(buffer)
        end = start + target.nbytes
        if not target.nbytes:
            return self._check_range(key, start, end)
        try:
            count = self._read(key, lambda: client.read_into(path, start, target))
        except _Told:
            return self._check_range(key, start, end)
        if count < target.nbytes:
            raise too_short(f"{self.url}/{key}", start + count, start, end)

    def size(self, key: str) -> int:
        path, client = self._path(key), self._client()
        return self._read(key, lambda: client.size(path))

    def list(self, prefix: str) -> Iterator[str]:
        client, root = self._client(), self._base + "/"
        try:
            names = self._ask(lambda: list(client.names(root + prefix)))
        except _Told as told:
            if told.answer.kind is not Kind.MISSING:
                raise self._said(told.answer, prefix) from None
            names = []
        keys = (name[len(root) :] for name in names if not name.endswith("/"))
        return iter(sorted(key for key in keys if key.startswith(prefix)))

    def _check_range(self, key: str, start: int, end: int) -> None:
        size_bytes = self.size(key)
        if max(start, end) > size_bytes:
            raise too_short(f"{self.url}/{key}", size_bytes, start, end)

    # ---- the place itself

    def check(self) -> None:
        if self._scheme not in CONDITIONAL_SCHEMES:
            raise no_conditional_write(self.url)
        super().check()

    def sweep_leftovers(self, older_than_s: float) -> int:
        client = self._client()
        return self._write("", lambda: client.abort_uploads(self._base + "/", older_than_s))

    def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        if opened and opened[0] == os.getpid():
            opened[1].close()

    def _client(self) -> ObjectClient:
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = (os.getpid(), _open_client(self._scheme, self._options))
            return self._opened[1]

    def _path(self, key: str) -> str:
        return f"{self._base}/{check_key(key)}"

    # ---- asking, and saying what came of it

    def _write(self, key: str, request: Callable[[], Result]) -> Result:
        try:
            return self._ask(request)
        except _Told as told:
            raise self._said(told.answer, key) from None

    def _read(self, key: str, request: Callable[[], Result]) -> Result:
        """What ``request`` returns. _Told comes out only for a range that the object does not have."""
        try:
            return self._ask(request)
        except _Told as told:
            if told.answer.kind is Kind.OUT_OF_RANGE:
                raise
            if told.answer.kind is Kind.MISSING:
                raise KeyError(key) from None
            raise self._said(told.answer, key) from None

    def _ask(self, request: Callable[[], Result]) -> Result:
        """Try until there is a clear answer or the tries are used up; any other answer than success is _Told."""
        waits_s = self._retry.waits_s(random.Random())
        while True:
            try:
                return request()
            except Exception as error:
                answer = read_answer(error)
            wait_s = next(waits_s, None)
            if wait_s is None or answer.kind not in (Kind.BUSY, Kind.LOST):
                raise _Told(answer)
            time.sleep(wait_s)

    def _said(self, answer: Answer, key: str) -> StorageError:
        """The sentence for the user, without anything that the library or the store has written."""
        if answer.kind is Kind.MISSING and not answer.what:
            answer = NO_BUCKET
        tried = f" in {self._retry.tries} tries" if answer.kind in (Kind.BUSY, Kind.LOST) else ""
        return StorageError(answer.what + tried, f"{self.url}/{key}".rstrip("/"), answer.cure)


def _again(url: str, retry: Retry, options: dict[str, Any]) -> RemoteBlobs:
    return RemoteBlobs(url, retry=retry, options=options)


def _known(scheme: str, url: str) -> None:
    from fsspec import available_protocols  # type: ignore[import-untyped]

    if scheme not in available_protocols():
        raise ConfigError("storage_path", url, "use a directory, file://DIR or s3://BUCKET/PREFIX")


def _open_client(scheme: str, options: Mapping[str, Any]) -> ObjectClient:
    if scheme in S3_SCHEMES:
        from elastic.storage.s3_client import S3Client

        return S3Client(options)
    try:
        return FsspecClient(scheme, options)
    except ImportError as error:
        raise ConfigError("storage_path", f"{scheme}://", str(error)) from None


def _body(data: Buffer) -> bytes | bytearray:
    return bytes(data) if isinstance(data, memoryview) else data
