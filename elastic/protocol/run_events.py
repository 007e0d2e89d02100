"""What the controller tells the run's lifecycle; each event carries ``at``, seconds on its clock. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elastic.errors import ElasticError
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot


@dataclass(frozen=True, slots=True)
class Departure:
    """How one member left the generation's train function, or that it is gone."""

    member: str
    rank: int
    cause: str
    """``interrupted``, ``finished``, ``error``, ``refused`` (ends the run as it is), ``unreadable`` (the snapshot could
    not be restored) or ``lost``."""
    step: int
    at: float
    error: str = ""
    traceback: str = ""
    collateral: bool = False
    """The error only says that a peer went away."""
    live_bytes: int = 0
    """What the rank kept of boundary ``step``, which it can prove to hold; 0 where it kept nothing."""
    live_slack_bytes: int = 0
    """By how much an even share of it may be exceeded."""
    live_reason: str = ""
    """Why nothing was kept."""
    failure: ElasticError | None = None
    """For ``refused`` and ``unreadable``: the error itself."""
    failure_class: str = ""
    """For ``error`` and ``lost``: see ``classification``."""
    node: str = ""
    """Where the rank was."""


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """The nodes that are alive, with how many ranks of this run each can carry: none, while it drains."""

    at: float
    nodes: Mapping[str, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class StoreReady:
    at: float
    node: str


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The node's store is gone: so is its memory, and its ranks are not to be trusted with staging."""

    at: float
    node: str
    why: str
    silent_s: float = 0.0
    """For how long it had not answered when it was given up; 0 where an event told of its end."""


@dataclass(frozen=True, slots=True)
class MemberReady:
    at: float
    member: str


@dataclass(frozen=True, slots=True)
class EntryFailed:
    """The user's code could not be loaded on a member: it could not be on any other."""

    at: float
    member: str
    error: str
    traceback: str
    failure: ElasticError | None = None


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """A node cannot take part, by name: another version of Python, torch or ours."""

    at: float
    node: str
    error: ElasticError


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """Word that a node goes away at ``deadline``; a stop at a boundary would take ``needs_s`` now, and an upload
    ``upload_s`` more. See ``notices``."""

    at: float
    node: str
    by: str
    """``drain``, ``sigterm`` or ``exclude``."""
    why: str
    deadline: float = math.inf
    needs_s: float = 0.0
    upload_s: float = 0.0
    member: str = ""
    """Whose process was told to end."""


@dataclass(frozen=True, slots=True)
class NodeStaying:
    """The word of ``by`` is taken back."""

    at: float
    node: str
    by: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    at: float
    member: str
    why: str
    step: int = -1
    failure_class: str = ""
    """See ``classification``; empty where nothing more is known than that it is gone."""
    traceback: str = ""
    """What it left of its own crash."""


@dataclass(frozen=True, slots=True)
class RanksHung:
    """These members of the generation stand still, and are the reason why: they have to be killed."""

    at: float
    members: tuple[str, ...]
    generation: int
    why: str
    stood_s: float = 0.0
    """For how long they had stood still when they were found."""
    stacks: str = ""
    """Where the stacks of all ranks were saved, relative to the run; empty if they were not."""


@dataclass(frozen=True, slots=True)
class Formed:
    """A rank's process group stands."""

    at: float
    member: str
    generation: int
    took_s: float = 0.0
    """Seconds since the rank was told to begin."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A rank restored, or had nothing to restore, and stands at its first boundary."""

    at: float
    member: str
    generation: int
    step: int
    share_bytes: int


@dataclass(frozen=True, slots=True)
class FirstStep:
    """A rank finished its first step of the generation."""

    at: float
    member: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class AtEnd:
    """A rank finished its last step and waits for the final snapshot."""

    at: float
    member: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Departed:
    """A rank left the train function."""

    at: float
    generation: int
    departure: Departure


@dataclass(frozen=True, slots=True)
class NodeCommitted:
    """A snapshot round committed in node memory."""

    at: float
    generation: int
    snapshot: NodeSnapshot
    purpose: str


@dataclass(frozen=True, slots=True)
class RoundAbandoned:
    at: float
    generation: int
    purpose: str
    reason: str
    confirmed: bool = True
    """Ranks may have staged, and left the boundary."""
    refused: bool = False
    """All shares were there and do not belong together: trying again changes nothing."""


@dataclass(frozen=True, slots=True)
class RemoteCommitted:
    at: float
    snapshot: RemoteSnapshot


@dataclass(frozen=True, slots=True)
class UploadsIdle:
    """No upload is in flight and none is due: what was to become durable is, or has failed with ``reason``."""

    at: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotDue:
    at: float


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    at: float
    workers: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline of the state may have passed."""

    at: float


@dataclass(frozen=True, slots=True)
class Late:
    """For ``by_s`` seconds until now nobody could be heard: the controller was held up, or its machine stood still."""

    at: float
    by_s: float
