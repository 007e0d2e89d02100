"""Which runs are under way in local clusters of this user, so that another terminal finds them.

One small file a process, in a directory of this user's own; the file of a process that is gone counts for nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run in a local cluster that the process ``pid`` has started."""

    run: str
    storage: str
    address: str
    pid: int


def _directory() -> Path:
    return Path(tempfile.gettempdir()) / f"ray-elastic-{os.getuid()}"


@contextlib.contextmanager
def announced(run: str, storage: str, address: str) -> Iterator[None]:
    """Let other terminals find the run while the block lasts."""
    path = _directory() / f"{os.getpid()}.json"
    written = False
    with contextlib.suppress(OSError):  # no temporary directory: the run goes on, it is only not found by name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.parent.stat().st_uid == os.getuid():
            path.write_text(json.dumps(asdict(LocalRun(run, storage, address, os.getpid()))))
            written = True
    try:
        yield
    finally:
        if written:
            path.unlink(missing_ok=True)


def local_runs() -> list[LocalRun]:
    """The runs of processes that are alive, newest first."""
    directory = _directory()
    found = []
    with contextlib.suppress(OSError):
        if directory.stat().st_uid != os.getuid():
            return []
        for path in sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
            try:
                record = LocalRun(**json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):
                continue
            if _alive(record.pid):
                found.append(record)
            else:
                path.unlink(missing_ok=True)
    return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
