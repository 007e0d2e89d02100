"""How a process of the run died, by what Ray says of it and by what it left behind: the evidence to classify."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from ray.exceptions import OutOfMemoryError, RayActorError

from actors.calls import first_line
from actors.last_words import LastWords, oom_kills, read_last_words
from elastic.clock import now
from elastic.protocol.classification import Evidence

_EXIT_CODE = re.compile(r"exit code (\d+)")
_MEMORY = ("running low on memory", "low on memory", "memory monitor", "OutOfMemory", "NODE_OUT_OF_MEMORY")
SETTLED_S = 2.0
"""A count of kills that is older than this was taken before a death that is asked about now."""


@dataclass(frozen=True, slots=True)
class Death:
    """An actor is gone; as text, why in one line."""

    why: str
    preempted: bool = False
    oom_killed: bool = False
    exit_code: int | None = None

    def __str__(self) -> str:
        return self.why


def death_of(error: BaseException) -> Death:
    """What Ray's error says. The usual text for a broken connection names memory as one of several causes: that says
    nothing."""
    text = str(error).split("Some common causes include")[0]
    code = _EXIT_CODE.search(text)
    return Death(
        first_line(error),
        preempted=isinstance(error, RayActorError) and error.preempted,
        oom_killed=isinstance(error, OutOfMemoryError) or any(word in text for word in _MEMORY),
        exit_code=int(code[1]) if code else None,
    )


def evidence_of(death: Death, words: LastWords, oom_killed: bool) -> Evidence:
    """Of a lost rank. Memory is to blame for a kill that left no word."""
    silent = words.exit_code is None and words.signal is None and death.exit_code is None
    return Evidence(
        text=death.why,
        lost=True,
        noticed=death.preempted,
        oom_killed=death.oom_killed or (oom_killed and silent),
        exit_code=words.exit_code if words.exit_code is not None else death.exit_code,
        signal=words.signal,
    )


def evidence_in(error: BaseException) -> tuple[Collection[str], int | None]:
    """(qualified names of the types of ``error`` and of all that it came from, with their bases; the first errno)."""
    names: dict[str, None] = {}
    errno: int | None = None
    seen: BaseException | None = error
    while seen is not None:
        for kind in type(seen).__mro__[:-2]:
            names[f"{kind.__module__}.{kind.__qualname__}"] = None
        if errno is None and isinstance(seen, OSError):
            errno = seen.errno
        seen = seen.__cause__ or seen.__context__
    return tuple(names), errno


class Coroner:
    """For the store of a node: reads what its ranks left in ``directory``, and counts kills for want of memory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._counts: deque[tuple[float, int]] = deque([(now() - SETTLED_S, oom_kills())], maxlen=16)

    def look(self) -> None:
        """Remember the count of now."""
        self._counts.append((now(), oom_kills()))

    def examine(self, member: str) -> tuple[LastWords, bool]:
        """The last words of a rank that has died, and whether the kernel has killed for memory meanwhile."""
        before = next((n for at, n in reversed(self._counts) if at <= now() - SETTLED_S), self._counts[0][1])
        self.look()
        return read_last_words(words_path(self._directory, member)), self._counts[-1][1] > before


def words_path(directory: str, member: str) -> str:
    """Where a rank leaves its last words."""
    return os.path.join(directory, f"words-{member}")
