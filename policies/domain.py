"""What a policy may be asked, and what it says about an answer that deserves doubt.

Two kinds of objection, each with a code that tests and scripts can rely on:

* ``PolicyError``: the question has no meaning (a negative cost, NaN, an impossible probability). Raised at once.
* ``Finding``: the question has an answer, and something must be said about it. ``level`` is ``"refuse"`` where
following
  the answer would be a mistake (a command refuses unless forced; a run that is already training goes on and reports it)
  and ``"warn"`` where the answer holds but its reader should know more.

Codes start with ``E_`` (error), ``R_`` (refuse) and ``W_`` (warn).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Finding",
    "PolicyError",
    "check_fraction",
    "check_nonnegative",
    "check_positive",
    "check_slowdown",
    "cost_findings",
    "refusals",
]

# Above c = a/M = 2 at most 5.2 % of the time is useful, whatever the interval; e^-3 = 5 % is left when R_eff = 3 M.
HOPELESS_COST_OVER_MTBF = 2.0
HOPELESS_RESTART_OVER_MTBF = 3.0


class PolicyError(ValueError):
    """The question has no meaning. ``code`` is stable; ``message`` is one sentence with the cure."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the reader of an answer must know: a stable ``code`` and a sentence."""

    code: str
    level: Literal["refuse", "warn"]
    message: str


def refusals(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings that make following the answer a mistake."""
    return tuple(finding for finding in findings if finding.level == "refuse")


def check_nonnegative(name: str, value: float) -> float:
    """``value`` as a float, if it is finite and at least 0. Raises ``PolicyError``."""
    number = _finite(name, value)
    if number < 0:
        raise PolicyError("E_NEGATIVE", f"{name} = {value!r} is negative; give 0 or more")
    return number


def check_positive(name: str, value: float) -> float:
    """``value`` as a float, if it is finite and above 0. Raises ``PolicyError``."""
    number = _finite(name, value)
    if number <= 0:
        raise PolicyError("E_NOT_POSITIVE", f"{name} = {value!r} is not above 0; give a positive number")
    return number


def check_slowdown(name: str, value: float) -> float:
    """``value`` as a float in [0, 1): the share of training speed lost. Raises ``PolicyError``."""
    number = _finite(name, value)
    if not 0 <= number < 1:
        raise PolicyError(
            "E_SLOWDOWN", f"{name} = {value!r} is not in [0, 1); it is the share of speed lost, 0.05 for five percent"
        )
    return number


def check_fraction(name: str, value: float) -> float:
    """``value`` as a float in (0, 1]: a probability or a share that cannot be 0. Raises ``PolicyError``."""
    number = _finite(name, value)
    if not 0 < number <= 1:
        raise PolicyError("E_FRACTION", f"{name} = {value!r} is not in (0, 1]; 0.9 means ninety percent")
    return number


def cost_findings(cost_s: float, mtbf_s: float, effective_restart_s: float) -> tuple[Finding, ...]:
    """What must be said about a visible cost and an effective restart beside an MTBF."""
    found: list[Finding] = []
    ratio = cost_s / mtbf_s
    if ratio >= HOPELESS_COST_OVER_MTBF:
        found.append(
            Finding(
                "R_COST",
                "refuse",
                f"one save costs {ratio:.2g} times the MTBF, so at most 5.2 % of the time can be useful; "
                "cut the visible cost, shrink the job, or add a faster tier",
            )
        )
    elif ratio >= 0.5:
        found.append(Finding("W_COST_HALF", "warn", f"one save costs {ratio:.0%} of the MTBF: at most 30 % is useful"))
    elif ratio >= 0.1:
        found.append(Finding("W_COST_TENTH", "warn", f"one save costs {ratio:.0%} of the MTBF: at most 62 % is useful"))
    share = effective_restart_s / mtbf_s
    if share >= HOPELESS_RESTART_OVER_MTBF:
        found.append(
            Finding(
                "R_RESTART",
                "refuse",
                f"a restart (with the write latency) takes {share:.2g} times the MTBF: it hardly ever succeeds; "
                "make restarts faster or shrink the job",
            )
        )
    elif share > 0.5:
        found.append(Finding("W_RESTART_LONG", "warn", f"a restart takes {share:.0%} of the MTBF"))
    return tuple(found)


def _finite(name: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise PolicyError("E_NOT_A_NUMBER", f"{name} = {value!r} is not a number") from None
    if not math.isfinite(number):
        raise PolicyError("E_NOT_FINITE", f"{name} = {value!r} is not finite; leave it out if it is unknown")
    return number
