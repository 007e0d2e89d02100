"""What the run's lifecycle wants done. Whoever performs a command answers with events. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.mesh import Mesh
from elastic.protocol.incident import Incident
from elastic.protocol.membership import Evacuation
from elastic.protocol.run_events import Departure
from elastic.protocol.tiers import RemoteSnapshot, RestoreOrder


@dataclass(frozen=True, slots=True)
class StartStore:
    node: str


@dataclass(frozen=True, slots=True)
class StartMember:
    member: str
    node: str


@dataclass(frozen=True, slots=True)
class KillMember:
    member: str
    why: str


@dataclass(frozen=True, slots=True)
class BeginGeneration:
    """To every rank: form the group of this generation and enter the train function."""

    generation: int
    ranks: tuple[str, ...]
    mesh: Mesh
    restore: RestoreOrder | None
    hold: bool
    """Wait at the first boundary for the snapshot of step 0: there is nothing else to come back to."""
    reason: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """To these members: leave the train function at the next chance."""

    members: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Peers report broken connections: find out which of these members still answer."""

    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartRound:
    """Open a snapshot round; with ``stop`` the generation ends at its boundary."""

    purpose: str
    stop: bool


@dataclass(frozen=True, slots=True)
class StartSalvage:
    """Open a round of what these ranks, which have left, kept of boundary ``step``: the live tier."""

    ranks: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True)
class CancelRound:
    reason: str


@dataclass(frozen=True, slots=True)
class EndRoundBeyond:
    """Every rank is at its end: give up an open round whose step lies beyond ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class CloseIncident:
    incident: Incident


@dataclass(frozen=True, slots=True)
class CloseNotice:
    """Word that nodes go away has led to this, or was taken back."""

    evacuation: Evacuation


@dataclass(frozen=True, slots=True)
class Warn:
    """Something that a person should see; the run goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A durable snapshot was found damaged again: no later start of the run is to try it."""

    snapshot: RemoteSnapshot
    reason: str


@dataclass(frozen=True, slots=True)
class MakeDurable:
    """Upload the newest node snapshot and answer with UploadsIdle when nothing is in flight."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run is over. ``status``: finished, stopped or failed."""

    status: str
    reason: str
    departure: Departure | None = None
    deterministic: bool = False
    kind: str = ""
    """For failed: ``user``, ``refused``, ``cluster``."""
