"""One snapshot attempt, from naming a boundary to the commit in node memory. Pure.

    OPENING ──all slots──▶ PROPOSED ──all accept──▶ SEALING ──all sealed, one point──▶ COMMITTED
       │                     │  ▲ passed: a later step │
       └──────── any refusal, loss or end of the generation ───────▶ ABANDONED

The boundary is agreed without a collective: the controller names a step ahead of the furthest rank; a rank that has
not reached it accepts and will wait there for the confirmation; if one has passed it, the controller names a later
one, which also releases the others. With ``stop`` the ranks leave the train function at that boundary, so a resize
loses no step.

A round of the live tier (purpose ``live``) skips PROPOSED: its ranks are survivors of a failure, numbered among
themselves, that have left and hold still.

Nothing is read before COMMITTED. An attempt that is abandoned never commits later: late reports are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.errors import CommitRefused
from elastic.protocol.commit import commit_check
from elastic.protocol.machine import Table, ignore
from elastic.protocol.shares import ShareReport, SlotRef

LIVE = "live"
OPENING, PROPOSED, SEALING, COMMITTED, ABANDONED = "opening", "proposed", "sealing", "committed", "abandoned"

HELD = ("entry", "final")
"""Purposes of rounds whose boundary every rank holds at: it cannot be named anew."""


@dataclass(frozen=True, slots=True)
class RoundState:
    """What is known of the attempt. ``share_bytes`` and the maps below are by rank."""

    attempt: str
    purpose: str
    """``entry``, ``periodic``, ``redundancy``, ``grow``, ``shrink``, ``stop``, ``final`` or ``live``."""
    generation: int
    stop: bool
    nodes: Mapping[int, str]
    """The node of each rank; its store owns the rank's share."""
    peers: Mapping[str, str]
    """For each node the node that keeps the replica; a node without one has no replica."""
    share_bytes: Mapping[int, int]
    step: int = -1
    phase: str = OPENING
    slots: Mapping[int, SlotRef] = field(default_factory=dict)
    furthest: int = -1
    margin: int = 2
    confirmed: bool = False
    """The ranks were told to stage: some may have left the boundary."""
    answered: frozenset[int] = frozenset()
    passed: frozenset[int] = frozenset()
    reports: Mapping[int, ShareReport] = field(default_factory=dict)
    places: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Nodes that hold each sealed share: the owner's first."""
    reason: str = ""
    refused: bool = False
    """All shares were there and do not belong together."""

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.nodes)


# --- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotsOpened:
    """A store has a slot for each of its ranks."""

    node: str
    slots: Mapping[int, SlotRef]


@dataclass(frozen=True, slots=True)
class SlotsRefused:
    """A store has no free slot or no memory."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class BoundaryNamed:
    """The controller looked at the ranks' steps: ``step`` is ahead of the furthest by a safe margin."""

    step: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The rank has not reached ``step`` and will wait there."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Passed:
    """The rank has already reached or passed the step that was named."""

    rank: int
    step: int
    at_step: int


@dataclass(frozen=True, slots=True)
class ShareSealed:
    """A store has hashed a share and its peer, if any, has checked its copy. ``places``: who holds it."""

    report: ShareReport
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShareFailed:
    """A share could not be captured, staged, sealed or replicated; it will not come."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RoundCancelled:
    """The generation ended or the controller gives up on the attempt."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndReached:
    """Every rank stands at its last boundary: a step beyond it will not come."""

    step: int


# --- commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSlots:
    node: str
    attempt: str
    share_bytes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class NameBoundary:
    """Ask the shell for a step ahead of the furthest rank (``at_least``); it answers with BoundaryNamed."""

    at_least: int


@dataclass(frozen=True, slots=True)
class Propose:
    rank: int
    attempt: str
    step: int
    slot: SlotRef
    stop: bool


@dataclass(frozen=True, slots=True)
class StageLive:
    """To a survivor that has left: stage share ``rank`` of what it kept of its last boundary."""

    rank: int
    attempt: str
    slot: SlotRef


@dataclass(frozen=True, slots=True)
class Confirm:
    """To every rank: at the agreed step, stage; and leave if the round says stop."""

    attempt: str
    step: int


@dataclass(frozen=True, slots=True)
class ReleaseRanks:
    """To every rank: forget the attempt and go on."""

    attempt: str


@dataclass(frozen=True, slots=True)
class CommitNodeTier:
    """To every store that holds a share: the attempt is committed; older ones may go."""

    attempt: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AbandonShares:
    """To every store: free the attempt's slots; nothing of it will ever be read."""

    attempt: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """To the run: what came of the attempt."""

    state: RoundState


Outcome = tuple[RoundState, tuple[Any, ...]]


def begin(state: RoundState) -> Outcome:
    """The first commands of a fresh attempt: a slot for every share."""
    by_node: dict[str, dict[int, int]] = {}
    for rank, node in state.nodes.items():
        by_node.setdefault(node, {})[rank] = state.share_bytes[rank]
    return state, tuple(OpenSlots(node, state.attempt, shares) for node, shares in sorted(by_node.items()))


def _opened(state: RoundState, event: SlotsOpened) -> Outcome:
    state = replace(state, slots={**state.slots, **event.slots})
    if len(state.slots) < len(state.nodes):
        return state, ()
    if state.purpose == LIVE:
        # Nobody trains: the boundary is the one that the survivors stand at.
        return replace(state, phase=SEALING, confirmed=True), tuple(
            StageLive(rank, state.attempt, state.slots[rank]) for rank in sorted(state.ranks)
        )
    return state, (NameBoundary(state.furthest + 1),)


def _named(state: RoundState, event: BoundaryNamed) -> Outcome:
    state = replace(state, phase=PROPOSED, step=event.step, answered=frozenset(), passed=frozenset())
    return state, tuple(
        Propose(rank, state.attempt, event.step, state.slots[rank], state.stop) for rank in sorted(state.ranks)
    )


def _accepted(state: RoundState, event: Accepted) -> Outcome:
    return _answered(state, event.rank, event.step, passed=False)


def _passed(state: RoundState, event: Passed) -> Outcome:
    return _answered(replace(state, furthest=max(state.furthest, event.at_step)), event.rank, event.step, passed=True)


def _answered(state: RoundState, rank: int, step: int, *, passed: bool) -> Outcome:
    if step != state.step:
        return state, ()
    state = replace(
        state,
        answered=state.answered | {rank},
        passed=state.passed | {rank} if passed else state.passed,
    )
    if state.answered != state.ranks:
        return state, ()
    if state.passed and state.purpose in HELD:
        return _abandon(state, f"ranks {sorted(state.passed)} are not at step {state.step} any more")
    if state.passed:
        return replace(state, margin=state.margin * 2), (NameBoundary(state.furthest + state.margin),)
    return replace(state, phase=SEALING, confirmed=True), (Confirm(state.attempt, state.step),)


def _sealed(state: RoundState, event: ShareSealed) -> Outcome:
    report = event.report
    state = replace(
        state,
        reports={**state.reports, report.rank: report},
        places={**state.places, report.rank: event.places},
    )
    if len(state.reports) < len(state.nodes):
        return state, ()
    try:
        commit_check([state.reports[rank] for rank in sorted(state.reports)], len(state.nodes))
    except CommitRefused as refusal:
        return _abandon(replace(state, refused=True), str(refusal))
    state = replace(state, phase=COMMITTED)
    return state, (CommitNodeTier(state.attempt, _all_nodes(state)), RoundEnded(state))


def _all_nodes(state: RoundState) -> tuple[str, ...]:
    nodes = {*state.nodes.values(), *(node for places in state.places.values() for node in places)}
    return tuple(sorted(nodes | set(state.peers.values())))


def _abandon(state: RoundState, reason: str) -> Outcome:
    state = replace(state, phase=ABANDONED, reason=reason)
    return state, (
        ReleaseRanks(state.attempt),
        AbandonShares(state.attempt, _all_nodes(state)),
        RoundEnded(state),
    )


def _refused(state: RoundState, event: SlotsRefused) -> Outcome:
    return _abandon(state, f"node {event.node}: {event.reason}")


def _share_failed(state: RoundState, event: ShareFailed) -> Outcome:
    return _abandon(state, f"rank {event.rank}: {event.reason}")


def _cancelled(state: RoundState, event: RoundCancelled) -> Outcome:
    return _abandon(state, event.reason)


def _end_reached(state: RoundState, event: EndReached) -> Outcome:
    if state.phase == SEALING and state.step <= event.step:
        return state, ()
    return _abandon(state, f"the ranks reached their last step {event.step} first")


TABLE: Table[RoundState] = {
    **{(phase, EndReached): _end_reached for phase in (OPENING, PROPOSED, SEALING)},
    (OPENING, SlotsOpened): _opened,
    (OPENING, SlotsRefused): _refused,
    (OPENING, BoundaryNamed): _named,
    (OPENING, RoundCancelled): _cancelled,
    (OPENING, ShareFailed): _share_failed,
    (PROPOSED, Accepted): _accepted,
    (PROPOSED, Passed): _passed,
    (PROPOSED, BoundaryNamed): _named,
    (PROPOSED, ShareFailed): _share_failed,
    (PROPOSED, RoundCancelled): _cancelled,
    (SEALING, ShareSealed): _sealed,
    (SEALING, ShareFailed): _share_failed,
    (SEALING, RoundCancelled): _cancelled,
    **{(phase, late): ignore for phase in (COMMITTED, ABANDONED) for late in (ShareFailed, RoundCancelled, EndReached)},
    **{(ABANDONED, late): ignore for late in (SlotsOpened, SlotsRefused, BoundaryNamed, Accepted, Passed, ShareSealed)},
}
