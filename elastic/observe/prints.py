"""What the ranks of a run print: one file of lines a rank on its node, bounded, that outlives the rank.

A line is written when its end is printed, so that the last line of a process that is killed is there. Nothing passes
through the controller: who wants lines reads them from the stores of the nodes, and after the run from its storage.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

FILE_BYTES = 8 << 20
KEPT_FILES = 2
"""Of one rank; older lines are forgotten."""
LINE_BYTES = 16 << 10
"""A longer line is cut."""
READ_BYTES = 1 << 20
PREFIX = "prints/"

Cursor = dict[str, int]
"""How far each file has been read."""


@dataclass(frozen=True, slots=True)
class Line:
    """One printed line: seconds since 1970, who printed it in which generation, ``stdout`` or ``stderr``."""

    t: float
    rank: int
    generation: int
    member: str
    stream: str
    text: str


def prints_directory(run: str, node: str) -> Path:
    """Where the files of a node lie."""
    return Path(tempfile.gettempdir()) / f"ray-elastic-{os.getuid()}" / "prints" / f"{run}-{node[:12]}"


class LineFile:
    """The file of one rank. ``place`` gives rank and generation, -1 where it has none. Thread-safe."""

    def __init__(self, directory: Path, member: str, place: Callable[[], tuple[int, int]]) -> None:
        self._directory, self._member, self._place = directory, member, place
        self._lock = threading.Lock()
        self._number = self._written = 0
        directory.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def _open(self) -> int:
        path = self._directory / f"{self._member}.{self._number:06d}.jsonl"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, stream: str, text: str) -> None:
        """Add one line."""
        rank, generation = self._place()
        line = Line(round(time.time(), 3), rank, generation, self._member, stream, text[:LINE_BYTES])
        data = json.dumps(asdict(line), separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._written and self._written + len(data) > FILE_BYTES:
                os.close(self._file)
                self._number, self._written = self._number + 1, 0
                old = self._directory / f"{self._member}.{self._number - KEPT_FILES:06d}.jsonl"
                old.unlink(missing_ok=True)
                self._file = self._open()
            os.write(self._file, data)  # one call a line: it survives the process, and nobody reads half of it
            self._written += len(data)


class Tee(io.TextIOBase):
    """A text stream that passes everything on and also adds its lines to ``lines``."""

    def __init__(self, stream: TextIO, name: str, lines: LineFile) -> None:
        self._stream, self._name, self._lines = stream, name, lines
        self._rest = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *whole, self._rest = (self._rest + text).split("\n")
            for line in whole:
                # What a progress bar draws over itself is one line: its last state.
                self._lines.add(self._name, line.rstrip("\r").rpartition("\r")[2])
            self._rest = self._rest[-LINE_BYTES:]
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def read_lines(directory: Path, cursor: Mapping[str, int], most_bytes: int = READ_BYTES) -> tuple[list[str], Cursor]:
    """Encoded lines of all files in ``directory`` after ``cursor``, about ``most_bytes`` at once, and the cursor after
    them. Nothing new gives an empty list."""
    found: list[str] = []
    after = dict(cursor)
    for path in sorted(directory.glob("*.jsonl")):
        start = after.get(path.name, 0)
        try:
            with open(path, "rb") as file:
                file.seek(start)
                data = file.read(most_bytes)
        except FileNotFoundError:
            continue
        whole = data[: data.rfind(b"\n") + 1]
        found += whole.decode(errors="replace").splitlines()
        after[path.name] = start + len(whole)
        most_bytes -= len(whole)
        if most_bytes <= 0:
            break
    return found, after


def decode_line(text: str) -> Line | None:
    """Inverse of what a LineFile writes; None for what is no line."""
    try:
        return Line(**json.loads(text))
    except (ValueError, TypeError):
        return None
