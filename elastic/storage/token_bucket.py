"""A token bucket: how long to wait before so many bytes may go. Pure; the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """``rate_per_s`` tokens flow in, at most ``burst`` are kept. ``level`` may be negative: that much was lent."""

    rate_per_s: float
    burst: float
    level: float
    at: float

    @staticmethod
    def full(rate_per_s: float, burst: float, at: float) -> TokenBucket:
        """A bucket that nothing was taken from until ``at``."""
        return TokenBucket(rate_per_s, burst, burst, at)

    def take(self, amount: float, at: float) -> tuple[TokenBucket, float]:
        """The bucket without ``amount``, and the seconds to wait before using it.

        More than there is is lent, and the wait pays it back: so one that takes more than the burst at once is served
        too, and those that come later wait for their turn. Over any time t no more than ``burst + rate * t`` goes out,
        but for one amount.
        """
        now = max(at, self.at)
        level = min(self.burst, self.level + (now - self.at) * self.rate_per_s) - amount
        return replace(self, level=level, at=now), max(0.0, -level / self.rate_per_s)
