"""How often to try again, and how long to wait in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retry:
    """At most ``tries`` in all; waits double from ``first_wait_s`` up to ``largest_wait_s``, each shortened at random
    by up to a half, so that many writers that met one overload do not come back as one."""

    tries: int = 6
    first_wait_s: float = 0.1
    largest_wait_s: float = 5.0

    def waits_s(self, random_source: random.Random) -> Iterator[float]:
        """The waits between the tries: one fewer than ``tries``."""
        for attempt in range(self.tries - 1):
            wait_s = min(self.first_wait_s * 2**attempt, self.largest_wait_s)
            yield wait_s * random_source.uniform(0.5, 1.0)
