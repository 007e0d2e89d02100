"""Shares over the stores' own socket: whole or by ranges, for whoever has the token."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from actors import share_socket
from actors.share_socket import ShareAddress, ShareServer, fetch, fetch_ranges
from elastic.errors import SnapshotError

DATA = np.random.default_rng(0).integers(0, 256, 9_000_001, np.uint8)


@pytest.fixture
def address() -> Iterator[ShareAddress]:
    @contextlib.contextmanager
    def find(name: str) -> Iterator[tuple[bytes, memoryview]]:
        if name != "a/0":
            raise SnapshotError("the share is not held on this node", name)
        yield b"header", DATA.data

    @contextlib.contextmanager
    def cut(name: str, starts: np.ndarray, sizes: np.ndarray) -> Iterator[list[memoryview]]:
        with find(name) as (_, data):
            yield [data[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist())]

    server = ShareServer("127.0.0.1", find, cut)
    yield server.address
    server.close()


def _fetch_ranges(address: ShareAddress, ranges: np.ndarray) -> np.ndarray:
    target = np.zeros(int(np.abs(ranges[:, 1]).sum()), np.uint8)
    ends = np.cumsum(np.abs(ranges[:, 1])).tolist()
    fetch_ranges(address, "a/0", ranges, [target.data[start:end] for start, end in zip([0, *ends], ends)])
    return target


def _fetch(address: ShareAddress, name: str = "a/0") -> tuple[bytes, np.ndarray]:
    seen: list[bytes] = []
    target = np.zeros(len(DATA), np.uint8)

    def place(header: bytes, nbytes: int) -> memoryview:
        seen.append(header)
        nonlocal target
        target = target[:nbytes]
        return target.data

    fetch(address, name, place)
    return seen[0], target


def test_a_share_arrives_whole_with_its_header(address: ShareAddress) -> None:
    header, found = _fetch(address)
    assert header == b"header"
    np.testing.assert_array_equal(found, DATA)


def test_ranges_arrive_in_the_order_in_which_they_were_asked_for(address: ShareAddress) -> None:
    ranges = np.array([[8_000_000, 1_000_001], [0, 3], [5, 0], [4_000_000, 2_000_000]])
    found = _fetch_ranges(address, ranges)
    np.testing.assert_array_equal(found, np.concatenate([DATA[start : start + size] for start, size in ranges]))


@pytest.mark.parametrize("ranges", [[[0, 9_000_002]], [[-1, 5]], [[5, -1]], [[9_000_001, 1]]])
def test_a_range_outside_of_the_share_is_refused(address: ShareAddress, ranges: list[list[int]]) -> None:
    with pytest.raises(SnapshotError, match="outside of the share"):
        _fetch_ranges(address, np.array(ranges))


def test_what_is_not_held_is_refused_with_the_reason(address: ShareAddress) -> None:
    with pytest.raises(SnapshotError, match="not held on this node"):
        _fetch(address, "a/1")


def test_without_the_token_nothing_is_sent(address: ShareAddress, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(SnapshotError, match="did not arrive: EOFError"):
        _fetch(replace(address, token="guessed"))
    assert "the token is not that of this store" in caplog.text


def test_a_store_that_is_gone_or_stands_still_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = ShareAddress("127.0.0.1", silent.getsockname()[1], "")
        monkeypatch.setattr(share_socket, "QUIET_S", 0.05)
        with pytest.raises(SnapshotError, match="did not arrive: TimeoutError"):
            _fetch(there)
    with pytest.raises(SnapshotError, match="did not arrive: ConnectionRefusedError"):
        _fetch(there)


def test_what_is_no_question_ends_that_connection_and_no_other(address: ShareAddress) -> None:
    for question in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 16, (2).to_bytes(8, "little") + bytes(8) + b"[]"):
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.sendall(question)
            with contextlib.suppress(OSError):  # the store may have closed the connection, with or without a reset
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
    _fetch(address)


def test_readers_that_leave_midway_do_not_use_up_the_store(address: ShareAddress) -> None:
    def leave(header: bytes, nbytes: int) -> memoryview:
        raise KeyboardInterrupt

    for _ in range(share_socket.MOST_AT_ONCE + 1):
        with pytest.raises(KeyboardInterrupt):
            fetch(address, "a/0", leave)
    _, found = _fetch(address)
    np.testing.assert_array_equal(found, DATA)
