"""Copies lists of memory pieces at memory speed, over a few threads, without the interpreter lock.

The compiled ``_stream_copy`` writes past the caches, which a copy by torch does not. Where the package was installed
without a compiler the C library copies instead, at the speed of an ordinary copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

try:
    from elastic.snapshot import _stream_copy  # type: ignore[attr-defined]

    _stream_copy.addresses  # noqa: B018 - one that was built from older sources has none
except (ImportError, AttributeError):
    _stream_copy = None

THREADED_BYTES = 4 << 20
"""Below so many bytes a second thread costs more than it saves."""
SMALL_PIECE_BYTES = 64 << 10
"""Pieces smaller than this on average are copied by one thread where each takes a call: threads would wait for the
interpreter lock more than they copy."""
BORDER_BYTES = 4096
_move_locked = ctypes.PyDLL(None).memmove
"""Without letting go of the interpreter lock: to get it back would take longer than to copy a small piece."""
_move_locked.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_locked.restype = ctypes.c_void_p

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of memory: ``offsets`` in the destination, ``addresses`` of the source, ``sizes`` in bytes, all [n].

    Whoever makes one keeps the memory alive until it has been copied.
    """

    offsets: Ints
    addresses: Ints
    sizes: Ints

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def split(self, parts: int) -> list[Pieces]:
        """The same memory in ``parts`` lists of nearly as many bytes; a piece at a border is cut."""
        ends = np.cumsum(self.sizes)
        total = int(ends[-1]) if len(ends) else 0
        starts = ends - self.sizes
        borders = total * np.arange(1, parts, dtype=np.int64) // parts // BORDER_BYTES * BORDER_BYTES
        points = np.unique(np.concatenate((starts, ends, borders)))
        sizes = np.diff(points)
        piece = np.searchsorted(ends, points[:-1], side="right")
        inside = points[:-1] - starts[piece]
        part = np.searchsorted(borders, points[:-1], side="right")
        offsets, addresses = self.offsets[piece] + inside, self.addresses[piece] + inside
        chosen = [part == number for number in range(parts)]
        return [Pieces(offsets[rows], addresses[rows], sizes[rows]) for rows in chosen if rows.any()]


def addresses_of(parts: Sequence[npt.NDArray[np.uint8] | memoryview]) -> Ints:
    """Where each of these contiguous buffers begins in memory, [n]."""
    found = np.empty(len(parts), np.int64)
    if _stream_copy is not None:
        _stream_copy.addresses(parts, found)
        return found
    for number, part in enumerate(parts):
        found[number] = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
    return found


def parts_for(pieces: Pieces, threads: int) -> list[Pieces]:
    """``pieces`` as lists that as many threads copy at once; one if that is faster."""
    small = _stream_copy is None and pieces.nbytes < SMALL_PIECE_BYTES * len(pieces.sizes)
    return pieces.split(1 if small or pieces.nbytes < THREADED_BYTES else threads)


def copy(parts: list[Pieces], destination: int, threads: Executor | None) -> None:
    """Copy every part to the memory at the address ``destination``; the first of them by the caller's thread, and all
    of them if there are no others."""
    if threads is None:
        for part in parts:
            _copy(part, destination)
        return
    others = [threads.submit(_copy, part, destination) for part in parts[1:]]
    for part in parts[:1]:
        _copy(part, destination)
    for copied in others:
        copied.result()


def _copy(part: Pieces, destination: int) -> None:
    if _stream_copy is not None:
        _stream_copy.copy(part.offsets + destination, part.addresses, part.sizes)
        return
    move = _move_locked if part.nbytes < SMALL_PIECE_BYTES * len(part.sizes) else ctypes.memmove
    targets = (part.offsets + destination).tolist()
    for to, address, size in zip(targets, part.addresses.tolist(), part.sizes.tolist()):
        move(to, address, size)
