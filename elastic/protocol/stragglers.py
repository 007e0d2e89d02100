"""Which rank is slow by itself? Pure: from what the train thread of each rank has worked.

In lockstep every rank's steps take as long as the slowest one's, so their length says nothing. What tells ranks apart
is how much of a step each of them *works*: the slow one works all the time, the others work less and wait for it in
their collectives. So what is compared is the work of one step, over a window; and a rank is told as slow only when it

1. works longer than ``factor`` times the median of its peers, and
2. costs them: the excess is a part of the step that counts, and
3. stands out: the excess is more than their own differences explain (MAD; 1.4826 makes it a standard deviation), and
4. does so in several windows in a row.

Peers are the ranks that have the same to do: those of the same pipeline stage. Without peers nobody is judged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

WINDOWS = 3
"""In a row, in which a rank is slow before it is told."""
LEAST_STEPS = 10
"""Of a window: a reading falls somewhere in a step, which shifts the mean of ten by a tenth at most."""
LEAST_SHARE = 0.1
"""Of a step: an excess below it is not worth a word."""
SPREADS = 5.0
_TO_DEVIATION = 1.4826


@dataclass(frozen=True, slots=True)
class RankWork:
    """One reading of one rank. Times are on its node's clock: readings of the same member alone are compared."""

    member: str
    generation: int
    step: int
    """Finished steps."""
    worked_s: float
    """What its train thread has worked in steps since its process began."""
    at: float


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slow by itself, by its last window: seconds of one step."""

    member: str
    rank: int
    from_step: int
    """Where the first of the windows in a row began."""
    to_step: int
    worked_s: float
    """What it worked itself, beside waiting for the others."""
    peers_s: float
    """The same of its peers, the median."""
    step_s: float
    windows: int

    @property
    def costs_s(self) -> float:
        """Of each step, to everybody."""
        return self.worked_s - self.peers_s


@dataclass(frozen=True, slots=True)
class Watch:
    """What is known of one generation: readings at the beginning of the window, and who was slow in the last ones."""

    generation: int = -1
    opened_at: float = 0.0
    opened: Mapping[str, RankWork] = field(default_factory=dict)
    slow: Mapping[str, Straggler] = field(default_factory=dict)


def look(
    watch: Watch,
    at: float,
    generation: int,
    groups: Collection[Collection[tuple[int, str]]],
    readings: Mapping[str, RankWork],
    *,
    factor: float,
    window_s: float,
) -> tuple[Watch, tuple[Straggler, ...] | None]:
    """The watch after these readings; and, where a window ended, who has been slow for long enough.

    ``groups`` are the ranks of the generation with their members, peers together; ``at`` is the reader's clock.
    """
    members = [member for group in groups for _, member in group]
    known = {m: readings[m] for m in members if m in readings and readings[m].generation == generation}
    if len(known) < len(members):
        return (watch if watch.generation == generation else Watch()), None
    if watch.generation != generation:
        return Watch(generation, at, known), None
    least = min((known[m].step - watch.opened[m].step for m in members), default=0)
    if at - watch.opened_at < window_s or least < LEAST_STEPS:
        return watch, None
    slow = {
        found.member: _again(watch.slow.get(found.member), found)
        for group in groups
        for found in _slow(watch.opened, known, group, factor)
    }
    told = tuple(sorted((s for s in slow.values() if s.windows >= WINDOWS), key=lambda s: s.rank))
    return replace(watch, opened_at=at, opened=known, slow=slow), told


def _again(before: Straggler | None, found: Straggler) -> Straggler:
    return replace(found, from_step=before.from_step, windows=before.windows + 1) if before else found


def _slow(
    before: Mapping[str, RankWork], after: Mapping[str, RankWork], group: Collection[tuple[int, str]], factor: float
) -> list[Straggler]:
    """Those of the group that were slow in this window, the slowest first."""
    worked: dict[str, float] = {}
    for _, member in group:
        steps = after[member].step - before[member].step
        worked[member] = (after[member].worked_s - before[member].worked_s) / steps
    rank_of = {member: rank for rank, member in group}
    rest = sorted(worked, key=lambda member: worked[member])
    found = []
    while len(rest) > 1:
        # Who was found slow is still a peer of the next: half of a group at most can be slow.
        member = rest.pop()
        others = [seconds for other, seconds in worked.items() if other != member]
        peers_s = median(others)
        excess = worked[member] - peers_s
        spread = _TO_DEVIATION * median(abs(seconds - peers_s) for seconds in others)
        first, last = before[member], after[member]
        step_s = (last.at - first.at) / (last.step - first.step)
        if worked[member] <= factor * peers_s or excess < LEAST_SHARE * step_s or excess <= SPREADS * spread:
            break
        found.append(
            Straggler(member, rank_of[member], first.step, last.step, worked[member], peers_s, step_s, windows=1)
        )
    return found
