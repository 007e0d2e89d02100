"""A store that fails as planned: any other store, with faults at its operations.

A point is named ``OPERATION:KEY``: put, put_if_absent, put_parts (also for files), get, read_into, size, list, delete.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from elastic.errors import StorageError
from elastic.faults import Fault, FaultPlan
from elastic.storage.blob_store import BlobStore, Buffer, PutOutcome, flat

_ANYWHERE = {Fault.FAIL, Fault.GONE}
_WRITES = _ANYWHERE | {Fault.FULL, Fault.TORN, Fault.LOST_ANSWER}
_READS = _ANYWHERE | {Fault.CORRUPT}


class FaultyBlobs(BlobStore):
    """``inner`` with the faults of ``plan``.

    A torn write leaves half of the object: under its name if the store is not ``atomic``, else under another name, as
    a temporary object would be. Raises ValueError for a rule that makes no sense at its operation.
    """

    def __init__(self, inner: BlobStore, plan: FaultPlan, *, atomic: bool = True) -> None:
        self.url, self.range_bytes = inner.url, inner.range_bytes
        self.inner, self.plan, self._atomic = inner, plan, atomic
        self._gone_for = 0.0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (_again, (self.inner, self.plan, self._atomic))

    def vanish(self) -> None:
        """Nothing answers until ``come_back``."""
        with self._lock:
            self._gone_for = float("inf")

    def come_back(self) -> None:
        """What was written before is there again."""
        with self._lock:
            self._gone_for = 0.0

    def put(self, key: str, data: Buffer) -> None:
        fault = self._strike("put", key, _WRITES)
        self._tear(fault, key, flat(data))
        self.inner.put(key, data)
        self._lose(fault, key)

    def put_parts(self, key: str, parts: Iterable[Buffer]) -> None:
        fault = self._strike("put_parts", key, _WRITES)
        if fault is Fault.TORN:
            self._tear(fault, key, memoryview(b"".join(bytes(part) for part in parts)))
        self.inner.put_parts(key, parts)
        self._lose(fault, key)

    def put_if_absent(self, key: str, data: Buffer) -> PutOutcome:
        fault = self._strike("put_if_absent", key, _WRITES)
        self._tear(fault, key, flat(data))
        outcome = self.inner.put_if_absent(key, data)
        return PutOutcome.UNKNOWN if fault is Fault.LOST_ANSWER else outcome

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        fault = self._strike("get", key, _READS)
        body = bytearray(self.inner.get(key, start, length))
        self._corrupt(fault, key, memoryview(body))
        return bytes(body)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        fault = self._strike("read_into", key, _READS)
        self.inner.read_into(key, start, buffer)
        self._corrupt(fault, key, flat(buffer))

    def size(self, key: str) -> int:
        self._strike("size", key, _ANYWHERE)
        return self.inner.size(key)

    def list(self, prefix: str) -> Iterator[str]:
        self._strike("list", prefix, _ANYWHERE)
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        fault = self._strike("delete", key, _ANYWHERE | {Fault.LOST_ANSWER})
        self.inner.delete(key)
        self._lose(fault, key)

    def sweep_leftovers(self, older_than_s: float) -> int:
        return self.inner.sweep_leftovers(older_than_s)

    def close(self) -> None:
        self.inner.close()

    def _strike(self, operation: str, key: str, possible: set[Fault]) -> Fault | None:
        with self._lock:
            if self._gone_for:
                self._gone_for -= 1
                raise self._error("no answer from the store", key)
        rule = self.plan.at(f"{operation}:{key}")
        if rule is None:
            return None
        if rule.fault not in possible:
            raise ValueError(f"{rule.fault} cannot strike at {operation}: {rule}")
        if rule.fault is Fault.GONE:
            with self._lock:
                self._gone_for = float(rule.lasts)
        if rule.fault in _ANYWHERE:
            raise self._error("no answer from the store", key)
        if rule.fault is Fault.FULL:
            raise self._error("the store is full", key)
        return rule.fault

    def _tear(self, fault: Fault | None, key: str, body: memoryview) -> None:
        if fault is Fault.TORN:
            name = f"{key}.torn-{len(self.plan.fired)}" if self._atomic else key
            self.inner.put(name, bytes(body[: body.nbytes // 2]))
            raise self._error("no answer from the store", key)

    def _lose(self, fault: Fault | None, key: str) -> None:
        if fault is Fault.LOST_ANSWER:
            raise self._error("no answer from the store", key)

    def _corrupt(self, fault: Fault | None, key: str, body: memoryview) -> None:
        if fault is Fault.CORRUPT and body.nbytes:
            bit = int(self.plan.fraction(f"bit of {key}") * body.nbytes * 8)
            body[bit // 8] ^= 1 << bit % 8

    def _error(self, what: str, key: str) -> StorageError:
        return StorageError(what, f"{self.url}/{key}", f"injected by {self.plan!r}")


def _again(inner: BlobStore, plan: FaultPlan, atomic: bool) -> FaultyBlobs:
    return FaultyBlobs(inner, plan, atomic=atomic)
