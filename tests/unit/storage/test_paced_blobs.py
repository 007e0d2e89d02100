"""Uploads keep to their bandwidth, whoever shares it, and what arrives is what was sent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.storage.memory_blobs import MemoryBlobs
from elastic.storage.paced_blobs import BLOCK_BYTES, Pace, PacedBlobs
from elastic.storage.token_bucket import TokenBucket

REQUESTS = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5)), max_size=40)
"""Amounts, and the seconds that pass before each is asked for."""


@settings(derandomize=True, deadline=None)
@given(REQUESTS, st.floats(0.1, 100), st.floats(0, 50))
def test_no_more_goes_out_than_the_rate_and_the_burst_allow(
    requests: list[tuple[float, float]], rate: float, burst: float
) -> None:
    bucket, at = TokenBucket.full(rate, burst, 0.0), 0.0
    sent: list[tuple[float, float]] = []
    for amount, pause in requests:
        at += pause
        bucket, wait = bucket.take(amount, at)
        sent.append((at + wait, amount))
    for i, (begin, first) in enumerate(sent):
        total = sum(amount for moment, amount in sent[i:])
        assert total - first <= (burst + rate * (sent[-1][0] - begin)) * (1 + 1e-6) + 1e-6


def test_what_is_within_the_burst_does_not_wait_and_a_clock_that_goes_back_does_no_harm() -> None:
    bucket, wait = TokenBucket.full(10, 5, 100.0).take(5, 100.0)
    assert wait == 0
    bucket, wait = bucket.take(20, 99.0)
    assert (wait, bucket.at) == (2.0, 100.0)
    assert bucket.take(0, 102.0)[1] == 0


class _Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


@pytest.mark.parametrize("size", [0, 10, BLOCK_BYTES, 5 * BLOCK_BYTES + 3])
def test_an_upload_takes_as_long_as_its_bytes_at_the_rate_and_arrives_whole(size: int) -> None:
    clock, inner = _Clock(), MemoryBlobs()
    rate = 2.0 * BLOCK_BYTES
    store = PacedBlobs(inner, Pace(rate, clock, clock.sleep))
    body = bytes(range(251)) * (size // 251 + 1)
    store.put("a/whole", memoryview(body)[:size])
    store.put_parts("a/parts", [body[: size // 3], body[size // 3 : size]])
    assert inner.get("a/whole") == inner.get("a/parts") == body[:size]
    expected = max(0.0, 2 * size / rate - 0.25)
    assert expected - 1e-6 <= clock.at <= expected + 1e-6
    assert list(store.list("a/")) == ["a/parts", "a/whole"]
    assert store.size("a/whole") == size


def test_reading_and_committing_are_not_held_up() -> None:
    clock = _Clock()
    store = PacedBlobs(MemoryBlobs(), Pace(1.0, clock, clock.sleep))
    store.put_if_absent("marker", b"x" * 100)
    assert store.get("marker") == b"x" * 100
    store.check()
    assert clock.at == 0
