"""How many failures of a class are borne: a bucket of tokens, refilled by committed training time.

A count that never refills ends a long run for failures that are months apart; one that is forgiven by every step lets a
bug that strikes now and then go on for ever. Here each failure takes a token, and training that was committed gives it
back: one for every ``refill_s`` of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.domain import check_nonnegative, check_positive

__all__ = [
    "BUDGETS",
    "HANG",
    "INFRASTRUCTURE",
    "OUT_OF_MEMORY",
    "PREEMPTION",
    "STORAGE",
    "USER",
    "Budget",
    "jittered_backoff_s",
]

USER, INFRASTRUCTURE, PREEMPTION = "user", "infrastructure", "preemption"
HANG, STORAGE, OUT_OF_MEMORY = "hang", "storage", "out of memory"


@dataclass(frozen=True, slots=True)
class Budget:
    """``burst`` failures at once, and one more for every ``refill_s`` seconds of committed training."""

    burst: int
    refill_s: float

    def __post_init__(self) -> None:
        check_nonnegative("burst", self.burst)
        check_positive("refill_s", self.refill_s)

    def spend(self, spent: float) -> tuple[float, bool, str]:
        """(tokens that are out after one more failure, whether the budget bears it, in words) for ``spent`` out now."""
        after = spent + 1.0
        if after <= self.burst + 1e-9:
            return after, True, f"{after:.3g} of {self.burst} used"
        return after, False, f"more than {self.burst}, one back for every {self.refill_s:g} s of committed training"

    def refill(self, spent: float, committed_s: float) -> float:
        """Tokens that are out after so much more training was committed."""
        return max(0.0, spent - max(0.0, committed_s) / self.refill_s)


BUDGETS = {
    USER: Budget(2, 600.0),
    INFRASTRUCTURE: Budget(50, 10.0),
    PREEMPTION: Budget(200, 10.0),
    HANG: Budget(5, 600.0),
    STORAGE: Budget(10, 60.0),
    OUT_OF_MEMORY: Budget(3, 600.0),
}
"""Generous where the train function has no part in it: a run that does not get on at all is ended by its count of
failures in a row."""


def jittered_backoff_s(failures: int, first_s: float, most_s: float, seed: int) -> float:
    """How long to wait after ``failures`` in a row, ``first_s`` after the second: twice as long each time, times 0.5 to
    1.5, the same for the same ``seed``. The first failure waits for nothing."""
    if failures < 2:
        return 0.0
    mixed = (seed * 0x9E3779B97F4A7C15 + failures * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    share = (mixed * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF) / 2.0**64
    return (0.5 + share) * min(most_s, first_s * 2.0 ** min(30, failures - 2))
