"""How shares get from one node's store to another's: over a socket, from the one's arena into the other's.

Nothing lies in between: the kernel takes from the mapped file and receives into the mapped slot, so a replica needs no
memory besides its slot. A connection carries one answer. Whoever asks must know the token of the store, which is told
only in calls between the actors of the run.

    asks:     u64 length, u64 ranges; JSON {token, name}; per range i64 start, i64 bytes
    answers:  u64 length of the header, u64 bytes; header; bytes, whole or those of the ranges in their order
              (without a header), or a length of 2^64 - 1, and a reason instead of the bytes
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.errors import SnapshotError

log = logging.getLogger("elastic.shares")

Held = Callable[[str], AbstractContextManager[tuple[bytes, memoryview]]]
"""From a name to its header and bytes, which stay as they are while the block runs. Raises SnapshotError."""
Ranges = npt.NDArray[np.int64]
Served = Callable[[str, Ranges, Ranges], AbstractContextManager[Sequence[memoryview]]]
"""From a name, starts and sizes to those ranges, as ``Held``."""
Place = Callable[[bytes, int], memoryview]
"""From the header and the number of bytes to the memory that receives them."""

QUIET_S = 30.0
"""A peer that neither sends nor takes a byte for so long is given up."""
LARGEST_QUESTION_BYTES = 64 << 20
MOST_AT_ONCE = 16
BUFFER_BYTES = 4 << 20
_LENGTHS = struct.Struct("<QQ")
_REFUSED = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ShareAddress:
    """Where a store serves its shares, and what it wants to hear first."""

    host: str
    port: int
    token: str


class ShareServer:
    """Serves what ``held`` and ``served`` find by name, on the address ``host`` of this node only, until ``close``."""

    def __init__(self, host: str, held: Held, served: Served) -> None:
        self._held, self._served = held, served
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = ShareAddress(host, self._socket.getsockname()[1], secrets.token_hex(16))
        self._free = threading.BoundedSemaphore(MOST_AT_ONCE)
        threading.Thread(target=self._accept, name="shares", daemon=True).start()

    def close(self) -> None:
        """Take no more questions; answers under way end by themselves."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            self._free.acquire()
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), name="share", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer:
                try:
                    peer.settimeout(QUIET_S)
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                    self._answer(peer)
                except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
                    log.warning("a share was not sent: %s: %s", type(error).__name__, error)
        finally:
            self._free.release()

    def _answer(self, peer: socket.socket) -> None:
        length, count = _LENGTHS.unpack(_receive(peer, _LENGTHS.size))
        if length + 16 * count > LARGEST_QUESTION_BYTES:
            raise ValueError(f"a question of {length + 16 * count} bytes")
        question = json.loads(_receive(peer, length))
        ranges = np.frombuffer(_receive(peer, 16 * count), np.int64).reshape(count, 2)
        if not hmac.compare_digest(str(question["token"]), self.address.token):
            raise ValueError("the token is not that of this store")
        try:
            if count:
                self._send_ranges(peer, str(question["name"]), ranges)
                return
            with self._held(str(question["name"])) as (header, data):
                peer.sendall(_LENGTHS.pack(len(header), data.nbytes) + header)
                peer.sendall(data)
        except SnapshotError as error:
            reason = str(error).encode()
            peer.sendall(_LENGTHS.pack(_REFUSED, len(reason)) + reason)

    def _send_ranges(self, peer: socket.socket, name: str, ranges: Ranges) -> None:
        outside = SnapshotError("a range lies outside of the share", name)
        if (ranges < 0).any():
            raise outside
        with self._served(name, ranges[:, 0], ranges[:, 1]) as parts:
            total = sum(part.nbytes for part in parts)
            if total != int(ranges[:, 1].sum()):
                raise outside
            peer.sendall(_LENGTHS.pack(0, total))
            for part in parts:
                peer.sendall(part)


def fetch(address: ShareAddress, name: str, place: Place) -> None:
    """Fill the memory that ``place`` gives with the share ``name``.

    Raises SnapshotError if the store refuses, does not answer, or ends before the last byte. Nothing is verified:
    whoever asks holds the checksums.
    """
    with _answer(address, name, np.zeros((0, 2), np.int64)) as (peer, header, nbytes):
        _receive_into(peer, place(header, nbytes)[:nbytes])


def fetch_ranges(address: ShareAddress, name: str, ranges: Ranges, targets: Sequence[memoryview]) -> None:
    """Fill each of ``targets`` with one of ``ranges`` [n, 2] (start, bytes) of the share ``name``, of its length.

    Raises as ``fetch`` does; the targets then hold anything.
    """
    with _answer(address, name, np.ascontiguousarray(ranges, np.int64)) as (peer, _, _):
        for target in targets:
            _receive_into(peer, target)


@contextlib.contextmanager
def _answer(address: ShareAddress, name: str, wanted: Ranges) -> Iterator[tuple[socket.socket, bytes, int]]:
    """The connection with the bytes still to come, the header, and how many bytes they are."""
    where = f"{name} at {address.host}:{address.port}"
    question = json.dumps({"token": address.token, "name": name}).encode()
    try:
        with socket.create_connection((address.host, address.port), timeout=QUIET_S) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            peer.sendall(_LENGTHS.pack(len(question), len(wanted)) + question + wanted.tobytes())
            length, nbytes = _LENGTHS.unpack(_receive(peer, _LENGTHS.size))
            if length == _REFUSED:
                raise SnapshotError(_receive(peer, nbytes).decode(), where)
            yield peer, _receive(peer, length), nbytes
    except (OSError, EOFError) as error:
        raise SnapshotError(f"the share did not arrive: {type(error).__name__}: {error}", where) from error


def _receive(peer: socket.socket, nbytes: int) -> bytes:
    block = bytearray(nbytes)
    _receive_into(peer, memoryview(block))
    return bytes(block)


def _receive_into(peer: socket.socket, view: memoryview[Any]) -> None:
    while view.nbytes:
        count = peer.recv_into(view)
        if not count:
            raise EOFError(f"the other side ended {view.nbytes} bytes before the last")
        view = view[count:]
