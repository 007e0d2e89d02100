"""The arena: files in node memory that are made, sized and touched beforehand, and used again.

A warm file copies at memory speed, a fresh one at a tenth of it, and that would be stall; so ``reserve`` allocates and
touches every page off the step path. A slot counts its users (the share that lies in it, uploads, restores) and is
given out again only when all of them have let go.

The directory belongs to one process, which holds a lock on it; the lock dies with the process, and ``sweep_arenas``
removes what such a process left behind.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elastic.errors import InternalError, StorageError
from elastic.protocol.shares import SlotRef

DEFAULT_PARENT = Path("/dev/shm")
DIRECTORY_PREFIX = "elastic-arena-"
TOUCH_BYTES = 8 << 20
PAGE_BYTES = 4096

_LOCK = "lock"


@dataclass(slots=True)
class _Slot:
    ref: SlotRef
    map: mmap.mmap
    users: int = 0


class ArenaPool:
    """A bounded number of slots in one directory. Thread-safe. ``close`` leaves nothing behind."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._slots: dict[int, _Slot] = {}
        self._next = 0
        self._changed = threading.RLock()
        # Files are made under this one, so that a long reservation holds up nobody who takes or releases a slot.
        self._growing = threading.Lock()
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(
                f"the arena's directory cannot be made: {error.strerror}",
                str(directory),
                "name another directory",
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise StorageError(
                "another process owns this arena", str(directory), "name another arena directory"
            ) from None
        _remove_slots(self.directory)

    def reserve(self, count: int, nbytes: int) -> None:
        """Have ``count`` slots of at least ``nbytes`` each, allocated and touched. May be called again with more.

        Free slots that are too small are replaced. Raises StorageError, with the numbers, if the place has less room.
        """
        with self._growing:
            with self._changed:
                missing = count - sum(slot.ref.capacity_bytes >= nbytes for slot in self._slots.values())
                if missing <= 0:
                    return
                small = [slot for slot in self._slots.values() if not slot.users and slot.ref.capacity_bytes < nbytes]
                for slot in small[:missing]:
                    self._drop(slot)
            self._check_room(missing, nbytes)
            for _ in range(missing):
                self._make(nbytes)

    def take(self, nbytes: int) -> SlotRef | None:
        """A free slot of at least ``nbytes``, with one user; None if all slots are in use.

        If only smaller slots are free one of them is replaced by a larger one, which costs the touching.
        """
        if (chosen := self._take_free(nbytes)) is not None:
            return chosen
        with self._growing:
            with self._changed:
                free = [slot for slot in self._slots.values() if not slot.users]
                if not free:
                    return None
                self._drop(max(free, key=lambda slot: slot.ref.capacity_bytes))
            self._check_room(1, nbytes)
            return self._make(nbytes, users=1)

    def _take_free(self, nbytes: int) -> SlotRef | None:
        with self._changed:
            fit = [slot for slot in self._slots.values() if not slot.users and slot.ref.capacity_bytes >= nbytes]
            if not fit:
                return None
            chosen = min(fit, key=lambda slot: slot.ref.capacity_bytes)
            chosen.users = 1
            return chosen.ref

    def hold(self, slot: SlotRef) -> None:
        """Add a user: the slot stays as it is until each user has called ``release``."""
        with self._changed:
            self._of(slot).users += 1

    def release(self, slot: SlotRef) -> None:
        """One user less; at none, the slot may be given out again."""
        with self._changed:
            held = self._of(slot)
            if not held.users:
                raise InternalError(f"arena slot {slot.slot} was released more often than held")
            held.users -= 1

    def renew(self, slot: SlotRef) -> None:
        """As ``release`` by the only user, but a new file takes the place of this one: whoever still writes to the old
        map does no harm."""
        with self._growing:
            with self._changed:
                self._drop(self._of(slot))
            self._make(slot.capacity_bytes)

    @contextmanager
    def holding(self, slot: SlotRef) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of a slot, held while in use."""
        self.hold(slot)
        try:
            yield self.view(slot)
        finally:
            self.release(slot)

    def view(self, slot: SlotRef) -> npt.NDArray[np.uint8]:
        """The bytes of the slot's file, writable, shared with every process that maps it."""
        with self._changed:
            return np.frombuffer(self._of(slot).map, np.uint8)

    @property
    def free_slots(self) -> int:
        with self._changed:
            return sum(not slot.users for slot in self._slots.values())

    @property
    def slots(self) -> tuple[SlotRef, ...]:
        """Every slot there is, so that a rank can map them all ahead of its first snapshot."""
        with self._changed:
            return tuple(slot.ref for slot in self._slots.values())

    @property
    def reserved_bytes(self) -> int:
        with self._changed:
            return sum(slot.ref.capacity_bytes for slot in self._slots.values())

    def close(self) -> None:
        """Remove all files and the directory. Maps that others still have stay valid until they drop them."""
        with self._changed:
            for slot in list(self._slots.values()):
                self._drop(slot)
            if self._lock >= 0:
                _remove(self.directory)
                os.close(self._lock)
                self._lock = -1

    def _of(self, slot: SlotRef) -> _Slot:
        try:
            return self._slots[slot.slot]
        except KeyError:
            raise InternalError(f"arena slot {slot.slot} ({slot.path}) is not there any more") from None

    def _drop(self, slot: _Slot) -> None:
        del self._slots[slot.ref.slot]
        os.unlink(slot.ref.path)
        # Not map.close(): a view that someone still reads keeps the pages, and the file's name is gone already.

    def _check_room(self, count: int, nbytes: int) -> None:
        stat = os.statvfs(self.directory)
        room, need = stat.f_bavail * stat.f_frsize, count * max(nbytes, 1)
        if need > room:
            raise StorageError(
                f"the arena needs {_gib(need)} more ({count} slots of {_gib(nbytes)}), and {_gib(room)} are free",
                str(self.directory),
                f"enlarge it (in a container: --shm-size={-(-(need + self.reserved_bytes) // (1 << 30)) + 1}g), "
                "or name a directory on a disk: arena_directory in the snapshot settings",
            )

    def _make(self, nbytes: int, users: int = 0) -> SlotRef:
        """A new file, allocated and touched. A name is never used twice, so a stale map is never taken for it."""
        capacity = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
        number = self._next
        self._next += 1
        path = self.directory / f"slot-{number:04d}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Allocate first: a page that is missing later would end the process that writes it (SIGBUS).
            _allocate(descriptor, capacity)
            zeros = memoryview(bytes(min(TOUCH_BYTES, capacity)))
            for start in range(0, capacity, TOUCH_BYTES):
                os.pwrite(descriptor, zeros[: capacity - start], start)
            mapped = mmap.mmap(descriptor, capacity)
        except OSError as error:
            os.unlink(path)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            raise StorageError(
                f"the arena has no room for a slot of {_gib(capacity)}: {error.strerror}",
                str(self.directory),
                "enlarge /dev/shm, or name a directory on a disk: arena_directory in the snapshot settings",
            ) from error
        finally:
            os.close(descriptor)
        _touch(np.frombuffer(mapped, np.uint8))
        slot = _Slot(SlotRef(str(path), capacity, number), mapped, users)
        with self._changed:
            self._slots[number] = slot
        return slot.ref


def sweep_arenas(parent: str | os.PathLike[str] = DEFAULT_PARENT, prefix: str = DIRECTORY_PREFIX) -> list[str]:
    """Remove arena directories under ``parent`` whose process has gone. Returns their paths."""
    swept = []
    for directory in sorted(Path(parent).glob(f"{prefix}*")):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            _remove(directory)
            swept.append(str(directory))
        finally:
            os.close(lock)
    return swept


def _remove_slots(directory: Path) -> None:
    for path in directory.glob("slot-*"):
        path.unlink(missing_ok=True)


def _remove(directory: Path) -> None:
    """Remove what is ours, and the pages and last words of ranks; a directory that holds anything else stays."""
    _remove_slots(directory)
    for path in (*directory.glob("words-*"), *directory.glob("page-*")):
        path.unlink(missing_ok=True)
    (directory / _LOCK).unlink(missing_ok=True)
    with suppress(OSError):
        directory.rmdir()


def _allocate(descriptor: int, capacity: int) -> None:
    try:
        for start in range(0, capacity, 64 * TOUCH_BYTES):
            os.posix_fallocate(descriptor, start, min(64 * TOUCH_BYTES, capacity - start))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.truncate(descriptor, capacity)


def _touch(view: npt.NDArray[np.uint8]) -> None:
    """Fault the pages into this process's map, in parts between which other threads run."""
    for start in range(0, len(view), TOUCH_BYTES):
        view[start : start + TOUCH_BYTES : PAGE_BYTES].max()


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"
