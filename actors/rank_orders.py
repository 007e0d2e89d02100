"""What the controller and a rank say to each other: plain data, without torch, so that the controller needs none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.entry import EntryPoint
from elastic.config import RestoreConfig
from elastic.errors import ElasticError
from elastic.mesh import Mesh
from elastic.progress import PhaseLimits
from elastic.protocol.classification import Evidence, classify
from elastic.protocol.run_events import Departure
from elastic.protocol.shares import SlotRef
from elastic.protocol.tiers import RestoreOrder


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank is told once, for its whole life."""

    run: str
    member: str
    node: str
    entry: EntryPoint
    config: Any
    """``train_loop_config``: the argument of the train function; None: it takes none."""
    storage: str
    seed: int
    rng: str
    pages: str
    """The directory on its node where it keeps its progress page."""
    phases: PhaseLimits
    rng_on_resize: str = "refuse"
    words: str = ""
    """Where it leaves word of how it ends: see ``last_words``."""
    use_gpu: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    collective_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class GenerationOrder:
    """What a rank is told to begin a generation."""

    generation: int
    rank: int
    ranks: tuple[str, ...]
    """The members of the generation, by rank."""
    mesh: Mesh
    rendezvous: tuple[str, int]
    restore: RestoreOrder | None
    hold: bool
    how: RestoreConfig | None = None
    """How to take up a snapshot that was there when the run was started; None for one of its own."""
    local_rank: int = 0
    local_world_size: int = 1


@dataclass(frozen=True, slots=True)
class LiveOrder:
    """What a survivor is told: stage share ``place`` of ``survivors`` from what it kept of its last boundary."""

    attempt: str
    slot: SlotRef
    place: int
    survivors: int


@dataclass(frozen=True, slots=True)
class RankEvent:
    """News of a rank. ``kind``: formed, entered, first_step, doubtful, at_end, departed, restored,
    terminating (it got SIGTERM); the rest by kind."""

    kind: str
    generation: int
    step: int = -1
    took_s: float = 0.0
    share_bytes: int = 0
    cause: str = ""
    error: str = ""
    traceback: str = ""
    collateral: bool = False
    failure: ElasticError | None = None
    error_types: Collection[str] = ()
    """For departed with an error: see ``classification.Evidence``."""
    errno: int | None = None
    live_bytes: int = 0
    """For departed: bytes that the rank kept of boundary ``step``; 0 where it kept none, and ``live_reason`` why."""
    live_slack_bytes: int = 0
    live_reason: str = ""
    restored_from: Mapping[str, int] = field(default_factory=dict)
    """For restored: bytes by place."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """For restored: the summary of the report, and in ``text`` one line of it."""


def departure_of(member: str, event: RankEvent, rank: int = -1, at: float = 0.0) -> Departure:
    """The lifecycle's word for a ``departed``."""
    evidence = Evidence(text=event.error, error_types=event.error_types, errno=event.errno)
    return Departure(
        member,
        rank,
        event.cause,
        event.step,
        at,
        event.error,
        event.traceback,
        event.collateral,
        live_bytes=event.live_bytes,
        live_slack_bytes=event.live_slack_bytes,
        live_reason=event.live_reason,
        failure=event.failure,
        failure_class=classify(evidence)[0] if event.cause == "error" else "",
    )
