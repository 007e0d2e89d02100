"""A store in a directory: a local disk, or a shared file system that has hard links and durable renames.

A write goes to a temporary name beside its target, is synced, and only then takes its name: by ``link`` where the name
must be new, which the file system itself refuses to do twice, by ``rename`` where it may be replaced. Then the
directory is synced, and before that every directory above that this process has not yet synced. So a name is seen by
nobody before its bytes are durable, and a crash leaves at worst a temporary name, which no listing shows.

Large writes go from memory to the disk past the page cache, and what is not in the page cache is read past it: a
snapshot takes no memory from training, and waits for no writeback. All system calls on bytes release the GIL.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence

from elastic.errors import StorageError
from elastic.storage import file_bytes
from elastic.storage.blob_store import LEFTOVER_PREFIX, BlobStore, Buffer, PutOutcome, check_key, flat, too_short

MOST_BUFFERS = 1024
"""Linux fills at most so many buffers in one call."""
LEFTOVER_AGE_S = 24 * 3600.0

_SAYINGS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", "free some space, keep fewer snapshots, or name another directory"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, keep fewer snapshots, or name another directory"),
    errno.EACCES: ("no permission", "give this user the right to read and write there, or name another directory"),
    errno.EPERM: ("no permission", "give this user the right to read and write there, or name another directory"),
    errno.EROFS: ("the file system is read-only", "mount it writable, or name another directory"),
    errno.ENOTDIR: ("a part of the path is a file, not a directory", "name another directory"),
    errno.EISDIR: ("a directory has this name", "name another directory"),
    errno.ENAMETOOLONG: ("the name is too long for this file system", "use a shorter run name or path"),
    errno.EMFILE: ("too many open files", "raise the limit: ulimit -n"),
    errno.ENFILE: ("too many open files on this machine", "raise fs.file-max"),
    errno.EIO: ("the disk reports an error", "check the disk, or name another directory"),
    errno.ESTALE: ("the network file system lost this directory", "mount it again"),
}


class LocalBlobs(BlobStore):
    """Blobs as files under one directory, which is made when first written to."""

    range_bytes = 2 << 20  # what was read is then still in the processor's cache when it is hashed and copied

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.path.expanduser(os.fspath(directory)))
        self.url = self._root
        self._synced: set[str] = set()
        self._synced_lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (LocalBlobs, (self._root,))

    # ---- writing

    def put(self, key: str, data: Buffer) -> None:
        self._write(key, [data], flat(data).nbytes, replace=True)

    def put_if_absent(self, key: str, data: Buffer) -> PutOutcome:
        written = self._write(key, [data], flat(data).nbytes, replace=False)
        return PutOutcome.WRITTEN if written else PutOutcome.REFUSED

    def put_parts(self, key: str, parts: Iterable[Buffer]) -> None:
        self._write(key, parts, 0, replace=True)

    def _write(self, key: str, parts: Iterable[Buffer], expected_bytes: int, *, replace: bool) -> bool:
        path = self._path(key)
        directory = os.path.dirname(path)
        temporary = os.path.join(directory, LEFTOVER_PREFIX + uuid.uuid4().hex)
        with self._saying("cannot write", key):
            descriptor = self._create(temporary)
        try:
            with self._saying("cannot write", key):
                if expected_bytes >= file_bytes.LARGE_BYTES:
                    file_bytes.preallocate(descriptor, expected_bytes)
            for part in parts:
                with self._saying("cannot write", key):
                    file_bytes.write_all(descriptor, flat(part))
            with self._saying("cannot write", key):
                os.fsync(descriptor)
                if replace:
                    os.replace(temporary, path)
                elif not _link(temporary, path, descriptor):
                    return False
                _sync_directory(directory)
            return True
        finally:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _create(self, temporary: str) -> int:
        """A new file of this name. A directory that a deletion prunes at this moment is made again."""
        directory = os.path.dirname(temporary)
        while True:
            self._make_directory(directory)
            try:
                return os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                with self._synced_lock:
                    self._synced.discard(directory)

    def _make_directory(self, directory: str, tries: int = 50) -> None:
        """Make ``directory`` and sync every level above it that is new or that this process never synced."""
        with self._synced_lock:
            if directory in self._synced:
                return
        above = os.path.dirname(directory)
        inside = directory.startswith(self._root + os.sep)
        if inside or not os.path.isdir(directory):
            if above != directory:
                self._make_directory(above)
            try:
                os.mkdir(directory)
            except FileExistsError:
                if not os.path.isdir(directory):
                    raise NotADirectoryError(errno.ENOTDIR, "a file has this name", directory) from None
            except FileNotFoundError:
                # Pruned above us between the two calls; or a file system as /proc, which says so of any new name.
                if not tries:
                    raise PermissionError(errno.EPERM, "no directory can be made here", directory) from None
                with self._synced_lock:
                    self._synced.discard(above)
                return self._make_directory(directory, tries - 1)
            _sync_directory(above)
        with self._synced_lock:
            self._synced.add(directory)

    # ---- reading

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._reading(key) as (descriptor, size_bytes):
            end = max(start, size_bytes) if length is None else start + length
            self._check_range(key, size_bytes, start, end)
            blocks = []
            while start < end:
                blocks.append(os.pread(descriptor, min(end - start, file_bytes.LARGEST_CALL_BYTES), start))
                self._check_range(key, start + len(blocks[-1]), start, start + 1)
                start += len(blocks[-1])
            return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        target = flat(buffer)
        with self._reading(key) as (descriptor, size_bytes):
            self._check_range(key, size_bytes, start, start + target.nbytes)
            self._fill(key, descriptor, start, target)

    def scatter(self, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        sizes = [buffer.nbytes for buffer in buffers]
        with self._reading(key) as (descriptor, size_bytes):
            self._check_range(key, size_bytes, start, start + sum(sizes))
            if len(buffers) == 1:
                return self._fill(key, descriptor, start, flat(buffers[0]))
            for first in range(0, len(buffers), MOST_BUFFERS):
                part = buffers[first : first + MOST_BUFFERS]
                wanted = sum(sizes[first : first + MOST_BUFFERS])
                count = os.preadv(descriptor, part, start) if wanted <= file_bytes.LARGEST_CALL_BYTES else 0
                if count < wanted:
                    at = start
                    for buffer in part:
                        self._fill(key, descriptor, at, flat(buffer))
                        at += buffer.nbytes
                start += wanted

    def mapped(self, key: str, start: int, length: int) -> memoryview | None:
        with self._reading(key) as (descriptor, size_bytes):
            self._check_range(key, size_bytes, start, start + length)
            cached = file_bytes.is_cached(descriptor, start, length)
            return file_bytes.map_range(descriptor, start, length) if cached else None

    def _fill(self, key: str, descriptor: int, start: int, target: memoryview) -> None:
        if target.nbytes >= file_bytes.LARGE_BYTES and not file_bytes.is_cached(descriptor, start, target.nbytes):
            filled = file_bytes.read_directly(descriptor, start, target)
            self._fill_the_usual_way(key, descriptor, start, target[: filled.start])
            start, target = start + filled.stop, target[filled.stop :]
        self._fill_the_usual_way(key, descriptor, start, target)

    def _fill_the_usual_way(self, key: str, descriptor: int, start: int, target: memoryview) -> None:
        while target.nbytes:
            count = os.preadv(descriptor, [target[: file_bytes.LARGEST_CALL_BYTES]], start)
            self._check_range(key, start + count, start, start + 1)
            start += count
            target = target[count:]

    def size(self, key: str) -> int:
        with self._reading(key) as (_, size_bytes):
            return size_bytes

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[tuple[int, int]]:
        """A descriptor of the object and its size."""
        path = self._path(key)
        with self._saying("cannot read", key):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                raise KeyError(key) from None
            try:
                status = os.fstat(descriptor)
                if stat.S_ISDIR(status.st_mode):
                    raise KeyError(key)
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)

    def _check_range(self, key: str, size_bytes: int, start: int, end: int) -> None:
        if max(start, end) > size_bytes:
            raise too_short(os.path.join(self._root, key), size_bytes, start, end)

    # ---- listing and deleting

    def list(self, prefix: str) -> Iterator[str]:
        above, _, _ = prefix.rpartition("/")
        if above:
            check_key(above)
        return (key for key in self._walk(above) if key.startswith(prefix))

    def _walk(self, above: str) -> Iterator[str]:
        """All keys under the directory ``above``, sorted: a directory sorts as its name with the slash."""
        with self._saying("cannot list", above):
            try:
                with os.scandir(os.path.join(self._root, above)) as entries:
                    names = sorted(
                        entry.name + "/" * entry.is_dir(follow_symlinks=False)
                        for entry in entries
                        if not entry.name.startswith(LEFTOVER_PREFIX)
                        and (entry.is_dir(follow_symlinks=False) or entry.is_file())
                    )
            except (FileNotFoundError, NotADirectoryError):
                return
        for name in names:
            key = f"{above}/{name}" if above else name
            if name.endswith("/"):
                yield from self._walk(key[:-1])
            else:
                yield key

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._saying("cannot delete", key):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            directory = os.path.dirname(path)
            # Without this a crash could bring a deleted marker back after its packs are gone.
            with contextlib.suppress(FileNotFoundError):
                _sync_directory(directory)
            while directory != self._root:
                try:
                    os.rmdir(directory)
                except OSError:
                    return
                directory = os.path.dirname(directory)

    def check(self) -> None:
        super().check()
        self.sweep_leftovers(LEFTOVER_AGE_S)

    def sweep_leftovers(self, older_than_s: float) -> int:
        with self._saying("cannot clean", ""):
            if not os.path.isdir(self._root):
                return 0
            # The file system's own clock: that of another machine may differ from ours.
            mark = os.path.join(self._root, LEFTOVER_PREFIX + uuid.uuid4().hex)
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            now = os.stat(mark).st_mtime
            os.unlink(mark)
            swept = 0
            for directory, _, names in os.walk(self._root):
                for name in names:
                    path = os.path.join(directory, name)
                    with contextlib.suppress(FileNotFoundError):
                        if name.startswith(LEFTOVER_PREFIX) and now - os.stat(path).st_mtime >= older_than_s:
                            os.unlink(path)
                            swept += 1
            return swept

    # ---- names and errors

    def _path(self, key: str) -> str:
        return os.path.join(self._root, check_key(key))

    @contextlib.contextmanager
    def _saying(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what, cure = _SAYINGS.get(error.errno or 0, (error.strerror or type(error).__name__, "check the disk"))
            raise StorageError(f"{doing}: {what}", os.path.join(self._root, key), cure) from error


def _link(temporary: str, path: str, descriptor: int) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A network file system may repeat a request whose answer was lost: two names mean that ours went through.
        return os.fstat(descriptor).st_nlink == 2
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise StorageError(
                "this file system has no hard links, so two writers could overwrite each other's commit",
                path,
                "name a directory on another file system",
            ) from None
        raise
    return True


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
