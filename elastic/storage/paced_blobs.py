"""A store that is written to no faster than it may be; reading is not held up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from elastic.clock import now
from elastic.storage.blob_store import BlobStore, Buffer, PutOutcome, flat
from elastic.storage.token_bucket import TokenBucket

BLOCK_BYTES = 1 << 20
"""Bytes are asked for in pieces of this, so that several uploads share what there is."""
BURST_S = 0.25
"""What may go out at once after a pause, in seconds of the rate."""


class Pace:
    """Shared by all that write for one node. ``clock`` and ``sleep`` are those of the machine."""

    def __init__(
        self, bytes_per_s: float, clock: Callable[[], float] = now, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._bucket = TokenBucket.full(bytes_per_s, bytes_per_s * BURST_S, clock())
        self._lock = threading.Lock()

    def wait_for(self, nbytes: int) -> None:
        """Return when ``nbytes`` more may be sent."""
        with self._lock:
            self._bucket, wait_s = self._bucket.take(nbytes, self._clock())
        if wait_s:
            self._sleep(wait_s)


class PacedBlobs(BlobStore):
    """``store``, written to at the pace of ``pace``."""

    def __init__(self, store: BlobStore, pace: Pace) -> None:
        self.store, self.pace = store, pace
        self.url, self.range_bytes = store.url, store.range_bytes

    def put(self, key: str, data: Buffer) -> None:
        if flat(data).nbytes > BLOCK_BYTES:
            return self.put_parts(key, [data])
        self.pace.wait_for(flat(data).nbytes)
        self.store.put(key, data)

    def put_parts(self, key: str, parts: Iterable[Buffer]) -> None:
        self.store.put_parts(key, self._paced(parts))

    def _paced(self, parts: Iterable[Buffer]) -> Iterator[memoryview]:
        for part in parts:
            view = flat(part)
            for start in range(0, view.nbytes, BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                self.pace.wait_for(block.nbytes)
                yield block

    def put_if_absent(self, key: str, data: Buffer) -> PutOutcome:
        return self.store.put_if_absent(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.store.get(key, start, length)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self.store.read_into(key, start, buffer)

    def size(self, key: str) -> int:
        return self.store.size(key)

    def list(self, prefix: str) -> Iterator[str]:
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def check(self) -> None:
        self.store.check()

    def sweep_leftovers(self, older_than_s: float) -> int:
        return self.store.sweep_leftovers(older_than_s)

    def close(self) -> None:
        self.store.close()
