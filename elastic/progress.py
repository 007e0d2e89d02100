"""Where the train thread stands: one tuple that it replaces at each mark, and that another thread may read at any time.

A mark costs one clock read and one attribute write. It says in which phase the rank is, since when, and how long it may
stand there before that is a hang: the limit of a step is learned from the steps so far, unless it was configured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from elastic.clock import now

IDLE = "idle"
"""In no generation, or done with it."""
FORMING, BUILDING = "forming", "building"
"""Meeting the others; from there to the first boundary. The generation as a whole has a limit for both."""
LOADING, FIRST_STEP, STEP = "loading", "first step", "step"
BOUNDARY = "boundary"
"""Between two steps, or waiting there for what the controller decides."""
SNAPSHOT = "snapshot"

AUTO_LEAST_S = 30.0
AUTO_FACTOR = 10.0

Mark = tuple[str, int, float, float]
"""(phase, finished steps, since when on this host's clock, seconds that it may last)."""


@dataclass(frozen=True, slots=True)
class PhaseLimits:
    """How long a rank may stand in a phase; infinity: as long as it likes.

    ``step_s`` None: ``AUTO_FACTOR`` times the longest step of this process, and at least ``AUTO_LEAST_S``; the limit of
    a first step then also comes down to that multiple of the longest first step, once there was one.
    """

    step_s: float | None = None
    first_step_s: float = 600.0
    loading_s: float = inf
    snapshot_s: float = inf


class Progress:
    """Written by the train thread only. It lives as long as the process, so that what was learned stays."""

    def __init__(self, limits: PhaseLimits | None = None) -> None:
        self._limits = limits or PhaseLimits()
        self._longest = {FIRST_STEP: 0.0, STEP: 0.0}
        step_s = self._limits.step_s
        self._limit_s = {
            LOADING: self._limits.loading_s,
            FIRST_STEP: self._limits.first_step_s,
            STEP: AUTO_LEAST_S if step_s is None else step_s,
            SNAPSHOT: self._limits.snapshot_s,
        }
        self.mark: Mark = (IDLE, 0, now(), inf)

    def enter(self, phase: str, step: int) -> None:
        """The rank is in ``phase`` from now on."""
        self.enter_with(phase, step, self._limit_s.get(phase, inf))

    def enter_with(self, phase: str, step: int, limit_s: float) -> None:
        """The same with a limit of its own."""
        at = now()
        before, _, since, _ = self.mark
        self.mark = (phase, step, at, limit_s)
        if before in self._longest and at - since > self._longest[before]:
            self._longest[before] = at - since
            self._learn(before)

    @contextmanager
    def named(self, phase: str, step: int, limit_s: float) -> Iterator[None]:
        """The same for a block; then what was before it begins anew."""
        before, _, _, before_limit_s = self.mark
        self.enter_with(phase, step, limit_s)
        try:
            yield
        finally:
            self.enter_with(before, step, before_limit_s)

    def limit_s(self, phase: str) -> float:
        """How long the phase may last, as far as that is known now."""
        return self._limit_s.get(phase, inf)

    def _learn(self, phase: str) -> None:
        if self._limits.step_s is not None:
            return
        learned = max(AUTO_LEAST_S, AUTO_FACTOR * self._longest[phase])
        self._limit_s[phase] = learned if phase == STEP else min(self._limits.first_step_s, learned)
