"""Bytes between memory and files: large ones past the page cache, cached ones where they lie.

The page cache takes a copy of each byte, memory that training could use, and its own time to write it back. Which way
is open depends on the file system, on addresses and offsets; where one is not, the bytes go the usual way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

import numpy as np

LARGEST_CALL_BYTES = 1 << 30
"""Linux moves at most 2 GiB less a page in one call."""
LARGE_BYTES = 1 << 20
"""From here on a write's space is reserved and its bytes go past the page cache."""
BLOCK_BYTES = 4096
"""What goes past the page cache begins and ends in the file at multiples of this."""
WRITEBACK_BYTES = 16 << 20
"""After so many bytes the kernel is asked to begin writing them, so that the disk works while the rest is copied."""

_POPULATE_READ = 22
"""Of ``madvise``, from Linux 5.14 on; Python has no name for it."""
_BEGIN_WRITEBACK = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
"""Linux only; it makes the sync at the end shorter and promises nothing itself, so its result does not matter."""
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


_mincore = getattr(ctypes.CDLL(None), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def write_all(descriptor: int, view: memoryview) -> None:
    """Write the whole of ``view`` at the descriptor's place."""
    done = _write_directly(descriptor, view)
    while done < view.nbytes:
        count = os.write(descriptor, view[done : done + WRITEBACK_BYTES])
        done += count
        if count >= LARGE_BYTES and _sync_file_range is not None:
            _sync_file_range(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR) - count, count, _BEGIN_WRITEBACK)


def _write_directly(descriptor: int, view: memoryview) -> int:
    """Write as many whole blocks of ``view`` as go to the disk as they lie in memory; how many bytes that was."""
    at = os.lseek(descriptor, 0, os.SEEK_CUR)
    if view.nbytes < LARGE_BYTES or at % BLOCK_BYTES:
        return 0
    done, whole = 0, view.nbytes - view.nbytes % BLOCK_BYTES
    with _where_possible(), _past_the_page_cache(descriptor):
        while done < whole and done % BLOCK_BYTES == 0:
            done += os.write(descriptor, view[done : min(done + WRITEBACK_BYTES, whole)])
    return done


def read_directly(descriptor: int, start: int, view: memoryview) -> slice:
    """Fill whole blocks of ``view`` with the bytes from ``start`` on, past the page cache; which part was filled.

    For what lies on the disk alone: to bring it into the page cache costs a copy and fresh memory.
    """
    first = -start % BLOCK_BYTES
    done, whole = first, view.nbytes - (start + view.nbytes) % BLOCK_BYTES
    if whole - first < LARGE_BYTES:
        return slice(0, 0)
    with _where_possible(), _past_the_page_cache(descriptor):
        while done < whole and (done - first) % BLOCK_BYTES == 0:
            if not (count := os.preadv(descriptor, [view[done : min(done + LARGEST_CALL_BYTES, whole)]], start + done)):
                break
            done += count
    return slice(first, done)


@contextlib.contextmanager
def _past_the_page_cache(descriptor: int) -> Iterator[None]:
    """The block's reads and writes go between the disk and the caller's memory; OSError EINVAL where they cannot."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


@contextlib.contextmanager
def _where_possible() -> Iterator[None]:
    """The block ends early where the system does not have what it asks for."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def is_cached(descriptor: int, start: int, length: int) -> bool:
    """Whether the page cache holds a range of a file; also where the system does not say."""
    if _mincore is None:
        return True
    try:
        pages = np.frombuffer(_map_pages(descriptor, start, length), np.uint8)
    except (OSError, ValueError):
        return True
    held = np.empty(-(-pages.nbytes // mmap.PAGESIZE), np.uint8)
    return _mincore(pages.ctypes.data, pages.nbytes, held.ctypes.data) != 0 or bool((held & 1).all())


def map_range(descriptor: int, start: int, length: int) -> memoryview | None:
    """A range of a file that never changes, as the page cache holds it. Half the cost of a read, which copies.

    To touch a page that the disk does not give ends the process, so the kernel is asked for all of them before; None
    where it cannot be asked or says no: a read then tells why.
    """
    try:
        pages = _map_pages(descriptor, start, length)
        pages.madvise(_POPULATE_READ)
    except (OSError, ValueError):
        return None
    return memoryview(pages)[len(pages) - length :]


def _map_pages(descriptor: int, start: int, length: int) -> mmap.mmap:
    """The range and what lies before it in its first page."""
    lead = start % mmap.ALLOCATIONGRANULARITY
    return mmap.mmap(descriptor, lead + length, access=mmap.ACCESS_READ, offset=start - lead)


def preallocate(descriptor: int, size_bytes: int) -> None:
    """Reserve the space: a full disk says so before the bytes are sent, and the file lies in one piece."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
