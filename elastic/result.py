"""What a run came to. Plain data that crosses processes and prints as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from elastic.errors import ElasticError
from elastic.protocol.stragglers import Straggler

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """One generation: who took part, from which state and why so."""

    generation: int
    world_size: int
    mesh: str
    nodes: tuple[str, ...]
    reason: str
    began_at_s: float
    restored_step: int = 0
    restored_from: str = ""
    """``live``, ``node``, ``remote``, or empty for a fresh start."""
    restored_how: str = ""
    """The mode of the restore, and what was cast, not used, left as built or of another version, in words."""


@dataclass(frozen=True, slots=True)
class IncidentReport:
    """One failure and the way back. ``split`` holds the parts of ``rto_s``: detect, salvage, place, decide, form,
    restore and first step, each in seconds; times count from the first sign of the failure in the run."""

    kind: str
    """``rank``, ``node``, ``hang`` or ``error``."""
    rung: str
    """``replace``, ``shrink`` or ``re-enter``."""
    why: str
    old_world_size: int
    new_world_size: int
    furthest_step: int
    restored_step: int
    steps_lost: int
    rto_s: float
    split: dict[str, float] = field(default_factory=dict)
    at_s: float = 0.0
    restored_from: str = ""
    """``live``, ``node`` or ``remote``."""
    not_live: str = ""
    """Why the survivors' own state was not taken."""
    failure_class: str = ""
    """``user``, ``infrastructure``, ``preemption``, ``hang``, ``storage`` or ``out of memory``."""
    rank: int = -1
    """The first that failed by itself, not because a peer went away; -1 where nobody did."""
    node: str = ""
    """Where it was."""
    traceback: str = ""
    """Its own, where it left one."""
    stacks: str = ""
    """For a hang: the object with the stacks of all ranks, relative to the run's directory."""


@dataclass(frozen=True, slots=True)
class StragglerReport(Straggler):
    """A rank that was slow by itself, for so many windows in a row: seconds of one step, in the last of them."""

    node: str
    generation: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on node {self.node[:12]} is slow: it works {self.worked_s:.3g} s of each step of "
            f"{self.step_s:.3g} s and its peers {self.peers_s:.3g} s, in steps {self.from_step} to {self.to_step}"
        )


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """One committed snapshot. ``stall_s`` is the longest stall of any rank, ``drain_s`` from there to the commit."""

    attempt: str
    step: int
    purpose: str
    generation: int
    nbytes: int
    stall_s: float
    drain_s: float
    copies: int
    """Nodes that hold each share in memory."""
    at_s: float
    remote: bool = False
    upload_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    """The trace: capture, plan and copy are the stall; hash and replicate the drain, the longest of any rank each;
    upload and commit what made it durable."""
    written_bytes: int = 0
    """Of ``nbytes`` what durable storage did not hold yet."""

    def trace(self) -> dict[str, Any]:
        """What the journal keeps when the snapshot is committed in node memory."""
        names = ("attempt", "step", "purpose", "generation", "nbytes", "copies", "stall_s", "drain_s", "parts_s")
        return {name: getattr(self, name) for name in names}


OWN_COLUMNS = ("step", "step_s", "filled_from")
"""Of a row of ``Result.metrics``: all others were reported by the train function."""


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a run. ``status``: finished, stopped or failed; ``error`` tells a failure."""

    run: str
    status: str
    reason: str
    step: int
    storage: str
    snapshot: str = ""
    """The newest durable snapshot, relative to the run's directory."""
    error: ElasticError | None = None
    metrics: tuple[dict[str, float], ...] = ()
    """Per finished step of the surviving trajectory: ``step``, ``step_s`` and what the train function reported on rank
    0; where that was lost with it, on the rank that ``filled_from`` then names."""
    generations: tuple[GenerationReport, ...] = ()
    incidents: tuple[IncidentReport, ...] = ()
    snapshots: tuple[SnapshotReport, ...] = ()
    notices: tuple[dict[str, Any], ...] = ()
    """Word that nodes go away, and what it led to: ``by``, ``nodes``, ``purpose``, and how long it took."""
    stragglers: tuple[StragglerReport, ...] = ()
    """Ranks that were slow by themselves while their peers waited."""
    interval_reasons: tuple[str, ...] = ()
    wall_s: float = 0.0
    productive_s: float = 0.0

    @property
    def steps_lost(self) -> int:
        """Finished steps that had to be done again, over all incidents."""
        return sum(incident.steps_lost for incident in self.incidents)

    @property
    def goodput(self) -> float:
        """Time in steps of the surviving trajectory over wall time from the first step on."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0

    def load_state(self, *names: str) -> dict[str, np.ndarray[Any, Any]]:
        """Tensors of the end state by name (all, or those that begin with one of ``names``), read from storage and
        checked. Dtypes that numpy lacks come as unsigned integers of their width."""
        from elastic.errors import RestoreError
        from elastic.snapshot.reader import SnapshotCatalog
        from elastic.storage.blob_store import open_store

        catalog = SnapshotCatalog(open_store(self.storage), self.run)
        ref = next((ref for ref in catalog.list() if self.snapshot.endswith(f"{ref.directory}/{ref.attempt}")), None)
        if ref is None:
            raise RestoreError("the run left no durable snapshot", f"{self.storage}/{self.run}")
        tensors = catalog.load(ref)
        return {name: value for name, value in tensors.items() if not names or name.startswith(names)}

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON-able values; ``error`` as its class and text."""
        value = asdict(self)
        value["error"] = {"type": type(self.error).__name__, "text": str(self.error)} if self.error else None
        value.update(steps_lost=self.steps_lost, goodput=self.goodput)
        return value
