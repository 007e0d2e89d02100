"""Which snapshots to keep: small rules over the list of them, combined with ``|``. Pure.

A rule answers for each snapshot whether it keeps it; what any rule keeps stays. Whatever the rules say, pinned
snapshots and the newest restorable one stay too (see collect).

    keep_last(3) | every_steps(1000) | every_hours(24) | best(2, "loss")

The same text in a configuration file is read by ``parse``.
"""

from __future__ import annotations

import ast
import math
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


RULES: dict[str, Callable[..., Retention]] = {
    "keep_last": keep_last,
    "every_steps": every_steps,
    "every_hours": every_hours,
    "best": best,
}


def parse(text: str | int) -> Retention:
    """The rule that ``text`` writes: a number stands for ``keep_last``. Raises ConfigError for anything else."""
    try:
        return _read(ast.parse(str(text).strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        cure = "use a number, or keep_last(3) | every_steps(1000) | every_hours(24) | best(2, 'loss') | everything"
        raise ConfigError("keep", text, f"{cure} ({getattr(error, 'msg', error)})") from None


def _read(node: ast.expr) -> Retention:
    """Read, never run: only the names of the rules, constants and ``|`` have a meaning."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _read(node.left) | _read(node.right)
    if isinstance(node, ast.Name) and node.id in ("pinned", "everything"):
        return pinned if node.id == "pinned" else everything
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RULES:
        options = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in node.keywords}
        return RULES[node.func.id](*map(ast.literal_eval, node.args), **options)
    value = ast.literal_eval(node)
    if type(value) is not int:
        raise ValueError(f"{ast.unparse(node)} is no rule")
    return keep_last(value)


def _firsts(groups: Sequence[float]) -> list[bool]:
    return [i == 0 or group != groups[i - 1] for i, group in enumerate(groups)]


def _positive(field: str, value: float) -> None:
    if isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(field, value, "use a finite number above 0")
