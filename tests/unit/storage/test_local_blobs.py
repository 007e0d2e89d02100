from __future__ import annotations

import errno
import mmap
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic.errors import StorageError
from elastic.storage import file_bytes
from elastic.storage.blob_store import LEFTOVER_PREFIX, PutOutcome, open_store
from elastic.storage.local_blobs import LocalBlobs

MIB = 1 << 20


def leftovers(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.name.startswith(LEFTOVER_PREFIX))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of its own with the given options; skips where that is not permitted."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        point = tmp_path / f"disk{len(mounted)}"
        point.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"mounting is not permitted here: {error}")
        mounted.append(point)
        return point

    yield mount
    for point in mounted:
        subprocess.run(["umount", str(point)], check=True)


class TestAFullDisk:
    @pytest.mark.parametrize("size", [2 * MIB, 900_000])
    def test_it_is_said_and_what_was_there_stays_readable(self, small_disk: Callable[[str], Path], size: int) -> None:
        root = small_disk("size=1m")
        store = LocalBlobs(root)
        store.put("kept", b"k" * 300_000)
        for write in (
            lambda: store.put("big", bytes(size)),
            lambda: store.put_if_absent("big", bytes(size)),
            lambda: store.put_parts("big", iter([bytes(size // 2), bytes(size - size // 2)])),
        ):
            with pytest.raises(StorageError) as full:
                write()
            assert str(full.value) == (
                f"cannot write: the disk is full ({root}/big); "
                "free some space, keep fewer snapshots, or name another directory"
            )
        assert list(store.list("")) == ["kept"]
        assert store.get("kept") == b"k" * 300_000
        assert leftovers(root) == []
        store.delete("kept")
        store.put("kept", b"k" * 600_000)

    def test_a_replacement_that_does_not_fit_leaves_the_old_one(self, small_disk: Callable[[str], Path]) -> None:
        store = LocalBlobs(small_disk("size=1m"))
        store.put("latest", b"o" * 600_000)
        with pytest.raises(StorageError, match="full"):
            store.put("latest", b"n" * 600_000)
        assert store.get("latest") == b"o" * 600_000


class TestADirectoryThatCannotBeUsed:
    def test_a_read_only_file_system_is_said(self, small_disk: Callable[[str], Path]) -> None:
        root = small_disk("size=1m")
        LocalBlobs(root).put("kept", b"1")
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        store = LocalBlobs(root)
        for call in (store.check, lambda: store.put("new", b"1"), lambda: store.delete("kept")):
            with pytest.raises(StorageError, match=r"the file system is read-only.*; mount it writable"):
                call()
        assert store.get("kept") == b"1"

    def test_a_file_where_the_directory_should_be_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        for root in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(StorageError, match="a part of the path is a file"):
                LocalBlobs(root).check()

    def test_no_permission_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "mkdir", forbidden)
        with pytest.raises(StorageError, match=r"cannot write: no permission .*; give this user the right"):
            LocalBlobs(tmp_path / "new").check()

    def test_a_name_that_is_too_long_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="too long"):
            LocalBlobs(tmp_path).put("x" * 300, b"1")


class TestDurability:
    def test_bytes_are_synced_before_they_get_their_name_and_the_directory_after(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[str] = []

        def noted(name: str) -> None:
            real = getattr(os, name)

            def call(*arguments: object) -> object:
                target = arguments[-1]
                path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
                path = os.path.relpath(path, tmp_path)
                done.append(f"{name} {'temporary' if LEFTOVER_PREFIX in path else path}")
                return real(*arguments)

            monkeypatch.setattr(os, name, call)

        for name in ("fsync", "link", "replace", "mkdir"):
            noted(name)
        store = LocalBlobs(tmp_path / "new" / "root")
        store.put_if_absent("a/k", b"1")
        above = ["mkdir new", "fsync .", "mkdir new/root", "fsync new", "mkdir new/root/a", "fsync new/root"]
        assert done == [*above, "fsync temporary", "link new/root/a/k", "fsync new/root/a"]
        done.clear()
        store.put("a/k", b"2")
        assert done == ["fsync temporary", "replace new/root/a/k", "fsync new/root/a"]
        done.clear()
        store.delete("a/k")
        assert done == ["fsync new/root/a"]

    def test_directories_that_another_process_made_are_synced_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        LocalBlobs(tmp_path).put("a/b/k1", b"1")
        synced: list[str] = []
        real = os.fsync

        def noted(descriptor: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", noted)
        LocalBlobs(tmp_path).put("a/b/k2", b"1")
        assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")} <= set(synced)

    def test_a_writer_that_is_killed_leaves_a_leftover_that_nobody_sees(self, tmp_path: Path) -> None:
        script = (
            "import sys; from elastic.storage.local_blobs import LocalBlobs\n"
            "def parts():\n"
            "    yield bytes(1 << 20)\n"
            "    print('half', flush=True)\n"
            "    sys.stdin.read()\n"
            "LocalBlobs(sys.argv[1]).put_parts('s/r0.pack', parts())\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"half\n"
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        store = LocalBlobs(tmp_path)
        assert [path.stat().st_size for path in leftovers(tmp_path)] == [MIB]
        assert list(store.list("")) == []
        assert store.put_if_absent("s/r0.pack", b"again") is PutOutcome.WRITTEN
        assert store.sweep_leftovers(3600) == 0
        assert store.sweep_leftovers(0) == 1
        assert leftovers(tmp_path) == []
        assert list(store.list("")) == ["s/r0.pack"]

    def test_only_old_leftovers_are_swept_and_the_first_check_does_it(self, tmp_path: Path) -> None:
        (tmp_path / "s").mkdir()
        for name, age_s in (("old", 3 * 86400), ("young", 600)):
            path = tmp_path / "s" / f"{LEFTOVER_PREFIX}{name}"
            path.write_bytes(b"x")
            os.utime(path, (path.stat().st_mtime - age_s,) * 2)
        LocalBlobs(tmp_path).check()
        assert [path.name for path in leftovers(tmp_path)] == [f"{LEFTOVER_PREFIX}young"]


class TestWriting:
    def test_short_writes_are_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, view: real(descriptor, view[:7]))
        body = bytes(range(100))
        LocalBlobs(tmp_path).put("k", body)
        assert (tmp_path / "k").read_bytes() == body

    def test_short_reads_are_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        body = bytes(range(100))
        store = LocalBlobs(tmp_path)
        store.put("k", body)
        real_pread, real_preadv = os.pread, os.preadv
        monkeypatch.setattr(os, "pread", lambda fd, count, start: real_pread(fd, min(count, 7), start))
        monkeypatch.setattr(os, "preadv", lambda fd, views, start: real_preadv(fd, [views[0][:7]], start))
        buffer = bytearray(50)
        store.read_into("k", 20, memoryview(buffer))
        assert (store.get("k"), bytes(buffer)) == (body, body[20:70])

    def test_a_file_system_without_preallocation_will_do(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def unsupported(*_: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(os, "posix_fallocate", unsupported)
        LocalBlobs(tmp_path).put("k", bytes(2 * MIB))
        assert (tmp_path / "k").stat().st_size == 2 * MIB

    def test_a_file_system_without_hard_links_is_refused_at_the_check(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unsupported(*_: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(os, "link", unsupported)
        with pytest.raises(StorageError, match="hard links"):
            LocalBlobs(tmp_path).check()
        assert leftovers(tmp_path) == []

    def test_of_many_processes_worth_of_stores_one_writes(self, tmp_path: Path) -> None:
        for turn in range(30):
            stores = [LocalBlobs(tmp_path) for _ in range(8)]
            with ThreadPoolExecutor(8) as pool:
                outcomes = list(pool.map(lambda store, turn=turn: store.put_if_absent(f"{turn}/C", b"x"), stores))
            assert outcomes.count(PutOutcome.WRITTEN) == 1

    def test_the_directory_may_vanish_and_is_made_again(self, tmp_path: Path) -> None:
        store = LocalBlobs(tmp_path / "root")
        store.put("a/b", b"1")
        (tmp_path / "root/a/b").unlink()
        (tmp_path / "root/a").rmdir()
        (tmp_path / "root").rmdir()
        store.put("a/b", b"2")
        assert store.get("a/b") == b"2"

    def test_a_deletion_leaves_no_empty_directories(self, tmp_path: Path) -> None:
        store = LocalBlobs(tmp_path / "root")
        store.put("a/b/c", b"1")
        store.put("a/d", b"1")
        store.delete("a/b/c")
        assert not (tmp_path / "root/a/b").exists()
        store.delete("a/d")
        assert list((tmp_path / "root").iterdir()) == []


def is_on_a_disk(directory: Path) -> bool:
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(directory)], check=True, capture_output=True, text=True)
    return "ext" in kind.stdout or "xfs" in kind.stdout


class TestPastThePageCache:
    """Large writes go from memory to the disk, and what lies on the disk alone comes back the same way."""

    def test_training_keeps_the_memory_that_a_large_write_would_take(self, tmp_path: Path) -> None:
        if not is_on_a_disk(tmp_path):
            pytest.skip("the temporary directory is in memory")
        store = LocalBlobs(tmp_path)
        source, target = (memoryview(mmap.mmap(-1, 3 * MIB)) for _ in range(2))
        source[:] = os.urandom(3 * MIB)
        store.put("k", source)
        assert store.mapped("k", 0, 3 * MIB) is None, "it must be read"
        store.read_into("k", 0, target)
        assert target == source
        assert store.mapped("k", 0, 3 * MIB) is None, "a read takes none either"
        assert store.get("k") == source
        assert store.mapped("k", 0, 3 * MIB) is not None, "what somebody brought into memory is looked at there"

    def test_a_file_system_that_has_no_such_way_is_written_and_read_the_usual_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refusing(descriptor: int, command: int, flags: int = 0) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return 0

        monkeypatch.setattr(file_bytes.fcntl, "fcntl", refusing)
        monkeypatch.setattr(file_bytes, "is_cached", lambda *_: False)
        store, body, back = LocalBlobs(tmp_path), os.urandom(2 * MIB), bytearray(2 * MIB)
        store.put("k", body)
        store.read_into("k", 0, memoryview(back))
        assert back == body

    @pytest.mark.parametrize("place", ["disk", "memory"])
    def test_any_size_from_any_address_comes_back_to_any_address(
        self, tmp_path: Path, small_disk: Callable[[str], Path], place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(file_bytes, "is_cached", lambda *_: False)
        store = LocalBlobs(tmp_path if place == "disk" else small_disk("size=40m"))
        room, back = (memoryview(mmap.mmap(-1, 20 * MIB)) for _ in range(2))
        room[:] = os.urandom(len(room))
        for size in (MIB - 1, MIB, MIB + 1, 17 * MIB + 4097):
            for address in (0, 512, 64, 1):
                data = room[address : address + size]
                store.put("k", data)
                assert store.size("k") == size
                for start in (0, 1, 4095, 4096, size - 100):
                    for lead in (start % 4096, 0, 64):
                        wanted = back[lead : lead + size - start]
                        wanted[:1], wanted[-1:] = b"?", b"?"
                        store.read_into("k", start, wanted)
                        assert wanted == data[start:], (size, address, start, lead)
        store.put_parts("parts", iter([room[:MIB], b"x" * 100, room[: 2 * MIB], room[:4096]]))
        assert store.get("parts") == b"".join([room[:MIB], b"x" * 100, room[: 2 * MIB], room[:4096]])


class TestNames:
    def test_paths_and_file_urls_name_the_same_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for url in (str(tmp_path / "runs"), f"file://{tmp_path}/runs", "runs", "./runs/"):
            store = open_store(url)
            assert store.url == str(tmp_path / "runs")
        assert not (tmp_path / "runs").exists()

    def test_a_listing_does_not_follow_a_link_to_a_directory(self, tmp_path: Path) -> None:
        store = LocalBlobs(tmp_path / "root")
        store.put("k", b"1")
        (tmp_path / "root" / "loop").symlink_to(tmp_path / "root")
        assert list(store.list("")) == ["k"]


@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="Linux 5.14 can say it")
def test_files_are_looked_at_where_the_kernel_says_beforehand_that_they_can_be_read(tmp_path: Path) -> None:
    store = LocalBlobs(tmp_path)
    store.put("k", bytes(range(200)) * 50)
    view = store.mapped("k", 5000, 5000)
    assert view is not None
    assert bytes(view) == bytes(range(200)) * 25
    assert view.readonly
