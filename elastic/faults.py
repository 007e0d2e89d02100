"""Which faults strike where, decided by one seed.

Nothing in the product asks for faults: a test wraps a store, or a loop of ``for command in commands``, and asks the
plan at named points, such as ``put:snapshots/0001/r0.pack`` or ``before Commit``. What strikes depends on the seed, the
rules and on how often each point was visited, not on the clock or on which thread came first.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase


class Fault(Enum):
    """What happens at a point. Whoever wraps says which of them it can act out."""

    FAIL = "fail"
    """The operation is not done, and says so."""
    LOST_ANSWER = "lost answer"
    """The operation is done, and nobody learns of it."""
    TORN = "torn"
    """Half of a write is done."""
    FULL = "full"
    CORRUPT = "corrupt"
    """A read returns one bit wrong."""
    GONE = "gone"
    """From now on nothing answers, for ``Rule.lasts`` more operations of any kind."""
    CRASH = "crash"
    """The process dies here."""


@dataclass(frozen=True, slots=True)
class Rule:
    """``fault`` strikes at the points that match ``point`` (a glob; ``*`` also matches slashes).

    The first ``after`` visits are spared, of the others each is struck with ``probability``, at most ``times`` (None:
    without end). Visits of all matching points count together.
    """

    point: str
    fault: Fault
    probability: float = 1.0
    after: int = 0
    times: int | None = 1
    lasts: int = 0


class FaultPlan:
    """A plan of faults. The same seed, rules and visits give the same faults. Usable from several threads.

    ``repr`` gives what is needed to have the same again: print it with every failure.
    """

    def __init__(self, seed: int, rules: tuple[Rule, ...] | list[Rule] = ()) -> None:
        self.seed = seed
        self.rules = tuple(rules)
        self._fired: list[tuple[str, Rule]] = []
        self._visits = [0] * len(self.rules)
        self._visits_of: dict[tuple[int, str], int] = {}
        self._strikes = [0] * len(self.rules)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"FaultPlan(seed={self.seed}, rules={list(self.rules)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (FaultPlan, (self.seed, self.rules))

    @property
    def fired(self) -> tuple[tuple[str, Rule], ...]:
        """Each point that was struck, with its rule, in order: for a test to prove that a rare path was reached."""
        with self._lock:
            return tuple(self._fired)

    def at(self, point: str) -> Rule | None:
        """The first rule that strikes at this visit of ``point``. Every matching rule counts the visit."""
        struck: Rule | None = None
        with self._lock:
            for index, rule in enumerate(self.rules):
                if not fnmatchcase(point, rule.point):
                    continue
                self._visits[index] += 1
                visit = self._visits_of[index, point] = self._visits_of.get((index, point), 0) + 1
                if (
                    struck is None
                    and self._visits[index] > rule.after
                    and (rule.times is None or self._strikes[index] < rule.times)
                    and self.fraction(f"{index}/{point}/{visit}") < rule.probability
                ):
                    self._strikes[index] += 1
                    struck = rule
            if struck is not None:
                self._fired.append((point, struck))
        return struck

    def fraction(self, name: str) -> float:
        """A number in [0, 1) that belongs to ``name`` under this seed."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
