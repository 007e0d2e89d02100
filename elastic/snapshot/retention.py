"""Which snapshots to keep: small rules over the list of them, combined with ``|``. Pure.

A rule answers for each snapshot whether it keeps it; what any rule keeps stays. Whatever the rules say, pinned
snapshots and the newest restorable one stay too (see collect).

    keep_last(3) | every_steps(1000) | every_hours(24) | best(2, "loss")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A committed snapshot, as far as retention looks at it."""

    directory: str
    step: int
    committed_at_s: float
    pinned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Retention:
    """A rule: candidates, oldest first, to one bool for each, true to keep."""

    rule: Callable[[Sequence[Candidate]], Sequence[bool]]
    name: str

    def __call__(self, candidates: Sequence[Candidate]) -> list[bool]:
        return list(self.rule(candidates))

    def __or__(self, other: Retention) -> Retention:
        return Retention(
            lambda candidates: [a or b for a, b in zip(self(candidates), other(candidates))],
            f"{self.name} | {other.name}",
        )

    def __str__(self) -> str:
        return self.name


def keep_last(n: int) -> Retention:
    """The newest ``n``."""
    _positive("keep_last", n)
    return Retention(lambda found: [i >= len(found) - n for i in range(len(found))], f"keep_last({n})")


def every_steps(n: int) -> Retention:
    """The first snapshot at or after each multiple of ``n`` steps."""
    _positive("every_steps", n)
    return Retention(lambda found: _firsts([c.step // n for c in found]), f"every_steps({n})")


def every_hours(hours: float) -> Retention:
    """The first snapshot of each span of ``hours``, counted from the epoch."""
    _positive("every_hours", hours)
    return Retention(
        lambda found: _firsts([c.committed_at_s // (hours * 3600) for c in found]), f"every_hours({hours:g})"
    )


def best(n: int, metric: str, *, largest: bool = False) -> Retention:
    """The ``n`` with the smallest value of ``metric`` (or the largest). One without the metric is not kept."""
    _positive("best", n)

    def rule(found: Sequence[Candidate]) -> list[bool]:
        scored = sorted(
            (value if not largest else -value, -i)
            for i, value in ((i, c.metrics.get(metric)) for i, c in enumerate(found))
            if value is not None
        )
        chosen = {-i for _, i in scored[:n]}
        return [i in chosen for i in range(len(found))]

    return Retention(rule, f"best({n}, {metric!r}{', largest=True' * largest})")


pinned = Retention(lambda found: [c.pinned for c in found], "pinned")
"""Those that someone pinned."""

everything = Retention(lambda found: [True] * len(found), "everything")
"""All: nothing is ever dropped."""


def _firsts(groups: Sequence[float]) -> list[bool]:
    return [i == 0 or group != groups[i - 1] for i, group in enumerate(groups)]


def _positive(field: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(field, value, "give a number above 0")
