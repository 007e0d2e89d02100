"""One small file a rank, in its node's arena: the rank writes where it stands, the node's store reads it.

A thread of the rank's process writes it a few times a second, whatever the train thread does; so its age tells whether
the process lives, and its content where training stands: two things that are judged apart. No call, no lock, and it can
be read of a process that does not answer. Sequence numbers at both ends show a record that is just being written.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from actors.own_work import OwnWork
from elastic.clock import now
from elastic.progress import Progress

BEAT_S = 0.25
PREFIX = "page-"
_RECORD = struct.Struct("<Qddddqqqq64sQ")


@dataclass(frozen=True, slots=True)
class Page:
    """A rank's own word. Times are on this host's clock."""

    member: str
    alive_at: float
    marked_at: float
    limit_s: float
    worked_s: float
    step: int
    generation: int
    pid: int
    born: int
    """When the process began, in the kernel's ticks: with the pid it names a process for ever."""
    phase: str

    @property
    def state(self) -> str:
        """The kernel's letter for the state of the process (``R``, ``S``, ``D``, ``T``, ...); empty if it is gone."""
        found = _stat(self.pid)
        return found[0] if found and int(found[19]) == self.born else ""

    @property
    def cpu_s(self) -> float:
        """Seconds that the process has run."""
        found = _stat(self.pid)
        return (int(found[11]) + int(found[12])) / os.sysconf("SC_CLK_TCK") if found else 0.0

    def kill(self) -> bool:
        """SIGKILL, to this very process; False if it is gone."""
        if not self.state:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            return True
        return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class PageWriter:
    """Writes the page of this process until the process ends; once, where it does not beat."""

    def __init__(self, directory: str, member: str, progress: Progress, *, beats: bool = True) -> None:
        self.progress = progress
        self.work = OwnWork()
        self.generation = -1
        self._sequence = 0
        self._born = int(_stat(os.getpid())[19])
        self._file = os.open(
            os.path.join(directory, PREFIX + member), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
        )
        self.write()
        if beats:
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self.write()

    def write(self) -> None:
        """One record."""
        phase, step, since, limit_s = self.progress.mark
        self.work.look(phase)
        self._sequence += 1
        record = _RECORD.pack(
            self._sequence, now(), since, limit_s, self.work.worked_s, step, self.generation, os.getpid(), self._born,
            phase.encode()[:64], self._sequence,
        )  # fmt: skip
        os.pwrite(self._file, record, 0)


def read_pages(directory: str) -> list[Page]:
    """The pages of all ranks of a node, those of processes that are gone included; sorted by member."""
    found = []
    for path in sorted(Path(directory).glob(f"{PREFIX}*")):
        page = _read(path)
        if page is not None:
            found.append(page)
    return found


def _read(path: Path, tries: int = 3) -> Page | None:
    for _ in range(tries):
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            if len(data) == _RECORD.size:
                first, alive, marked, limit_s, worked_s, step, generation, pid, born, phase, last = _RECORD.unpack(data)
                if first == last:
                    name = phase.rstrip(b"\0").decode(errors="replace")
                    member = path.name.removeprefix(PREFIX)
                    return Page(member, alive, marked, limit_s, worked_s, step, generation, pid, born, name)
    return None
