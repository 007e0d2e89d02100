"""Is this a hang, and whose fault? Pure: from what the stores say of their ranks, and from the stacks.

A rank that stands still need not be the culprit: in a collective all wait for the one that does not come. So nobody is
judged while anybody may still be on the way to where the others wait. Then, the surest sign first:

1. a process that is stopped: it does not even say that it lives;
2. who has finished fewer steps than the others waits for none of them;
3. who does not say that it lives, while the others do;
4. who stands in another phase than most, such as in an evaluation that the others do not know of;
5. whose stack differs: most ranks wait in the same call, or in a collective, and this one stands elsewhere.

Where none stands out, the one that has been silent for longest goes; the same again, and everybody goes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastic.protocol.stragglers import RankWork

STANDING = ("boundary", "idle")
"""Phases in which a rank waits for the run: it is nobody's hope, and at no fault."""


@dataclass(frozen=True, slots=True)
class RankPulse:
    """What a store knows of one of its ranks. Ages, not times: clocks of two nodes are not compared."""

    member: str
    phase: str
    step: int
    """Finished steps."""
    idle_s: float
    """Since its last mark."""
    limit_s: float
    """How long it may stand in this phase."""
    silent_s: float
    """Since a thread of its process last said that it lives."""
    stopped: bool = False
    """The operating system says that the process is stopped."""

    @property
    def over(self) -> bool:
        """It stands for longer than it may."""
        return self.idle_s > self.limit_s


@dataclass(frozen=True, slots=True)
class NodePulse:
    """One node's ranks of a generation in a few words; only those that stand still are named."""

    node: str
    address: str
    over: tuple[RankPulse, ...] = ()
    """Ranks that stand for longer than they may, or whose process is stopped."""
    moving_step: int | None = None
    """The fewest finished steps of a rank that is neither over nor waiting for the run; None: there is no such rank."""
    work: tuple[RankWork, ...] = ()
    """What each of the node's ranks has worked: see ``stragglers``."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Ranks that stand still with nobody on the way to them. ``culprit`` is empty where only stacks can tell."""

    standing: tuple[RankPulse, ...]
    culprit: str
    why: str


def suspicion(pulses: Collection[NodePulse], silence_s: float) -> Suspicion | None:
    """What is to be made of the last word of all nodes; None: nothing, or not yet.

    ``silence_s`` is how long a stopped process may be silent.
    """
    standing = tuple(sorted((rank for pulse in pulses for rank in pulse.over), key=lambda rank: rank.member))
    for rank in standing:
        if rank.stopped and rank.silent_s > silence_s:
            return Suspicion(standing, rank.member, f"its process is stopped, for {rank.silent_s:.1f} s")
    over = [rank for rank in standing if rank.over]
    if not over:
        return None
    moving = [pulse.moving_step for pulse in pulses if pulse.moving_step is not None]
    least = min(rank.step for rank in over)
    if any(step <= least for step in moving):
        return None
    behind = [rank for rank in over if rank.step == least]
    others = len(over) - len(behind) + len(moving)
    if others and len(behind) <= others:
        first = max(behind, key=lambda rank: rank.idle_s)
        return Suspicion(standing, first.member, f"{_stands(first)}; the others are further")
    if len(silent := [rank for rank in behind if rank.silent_s > silence_s]) == 1:
        return Suspicion(standing, silent[0].member, f"{_stands(silent[0])}, and does not say that it lives")
    phases = Counter(rank.phase for rank in behind)
    rare, times = min(phases.items(), key=lambda item: item[1])
    if len(phases) == 2 and times == 1 and len(behind) > 2:
        odd = next(rank for rank in behind if rank.phase == rare)
        return Suspicion(standing, odd.member, f"{_stands(odd)}; the others are in the {max(phases, key=phases.get)}")  # type: ignore[arg-type]
    return Suspicion(standing, "", "")


def _stands(rank: RankPulse) -> str:
    return f"it stands in the {rank.phase} after step {rank.step}, for {rank.idle_s:.1f} s"


# --- stacks ----------------------------------------------------------------------------------------------------------

_FRAME = re.compile(r"^\s+(?P<call>.+?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")
_COLLECTIVE = re.compile(r"torch[/\\]distributed[/\\]|torch[/\\]autograd[/\\]graph\.py|torch[/\\]cuda[/\\]")
TRAIN_THREAD = '"train"'


def train_stack(dump: str) -> tuple[str, ...]:
    """The frames of the train thread, innermost first, out of a dump of all threads; empty if it is not in there.

    A dump has one paragraph a thread, headed by a line that ends with the thread's name in quotes, and one indented
    line a frame: ``function (file:line)``.
    """
    frames: list[str] = []
    inside = False
    for line in dump.splitlines():
        if line[:1] not in (" ", "\t", ""):
            inside = line.rstrip().endswith(TRAIN_THREAD)
        elif inside and _FRAME.match(line):
            frames.append(line.strip())
    return tuple(frames)


def waits_for_peers(stack: Sequence[str]) -> bool:
    """Whether the innermost call is a collective, or the engine of autograd, whose hooks wait for them."""
    return bool(stack) and is_collective(stack[0])


def is_collective(call: str) -> bool:
    """Whether a frame, or the file that its code is in, is where a thread stands that waits for its peers."""
    return _COLLECTIVE.search(call) is not None


def odd_one_out(stacks: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """(member, why) of the one whose train thread stands elsewhere than the others'; empty where none does."""
    known = {member: stack for member, stack in stacks.items() if stack}
    apart = [member for member, stack in known.items() if not waits_for_peers(stack)]
    if len(apart) == 1 and len(known) > 1:
        return apart[0], f"it stands in {known[apart[0]][0]}; the others wait in a collective"
    places = Counter(stack[0] for stack in known.values())
    if len(places) > 1:
        most, times = places.most_common(1)[0]
        rest = [member for member, stack in known.items() if stack[0] != most]
        if len(rest) == 1 and times > 1:
            return rest[0], f"it stands in {known[rest[0]][0]}; the others in {most}"
    return "", ""


def still_moving(
    before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]], cpu_share: Mapping[str, float]
) -> list[str]:
    """Members that do something between two looks, without a mark: other frames, or work outside of a collective.

    ``cpu_share`` is the part of that time in which their processes ran.
    """
    return sorted(
        member
        for member, stack in after.items()
        if stack
        and not waits_for_peers(stack)
        and (before.get(member, stack) != stack or cpu_share.get(member, 0.0) > 0.5)
    )
