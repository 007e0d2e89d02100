"""What is known of a run: enough to decide what it does next. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.mesh import Mesh
from elastic.protocol.incident import Incident
from elastic.protocol.membership import Member, Node, peer_of
from elastic.protocol.run_commands import EndRun
from elastic.protocol.run_events import Departure
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot

GATHERING, FORMING, RUNNING, STOPPING, UNWINDING = "gathering", "forming", "running", "stopping", "unwinding"
FINISHING, ENDED = "finishing", "ended"


@dataclass(frozen=True, slots=True)
class Limits:
    """The part of the configuration that decides here."""

    mesh: Mapping[str, int]
    min_workers: int
    max_workers: int
    replicas: int = 1
    max_failures_without_progress: int = 5
    max_user_errors: int = 3
    unwind_timeout_s: float = 10.0
    form_timeout_s: float = 120.0
    wait_for_workers_s: float = 10.0
    wait_for_cluster_s: float = 600.0


@dataclass(frozen=True, slots=True)
class RunState:
    """All that decides what the run does next."""

    limits: Limits
    phase: str = GATHERING
    generation: int = 0
    target: int = 0
    """Ranks that are wanted now: the maximum, unless the user asked for fewer."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    members: Mapping[str, Member] = field(default_factory=dict)
    members_made: int = 0
    ranks: tuple[str, ...] = ()
    """Members of the current or last generation, by rank."""
    mesh: Mesh | None = None
    entered: Mapping[int, int] = field(default_factory=dict)
    """Share bytes of each rank that reached its first boundary."""
    at_end: Mapping[int, int] = field(default_factory=dict)
    """The step of each rank that reached the end of its steps."""
    departures: Mapping[int, Departure] = field(default_factory=dict)
    node_snapshots: tuple[NodeSnapshot, ...] = ()
    remotes: tuple[RemoteSnapshot, ...] = ()
    """Committed in durable storage, newest first."""
    restoring: str = ""
    """Attempt that this generation restores from."""
    round_open: str = ""
    """Purpose of the snapshot round that is open, if any."""
    incident: Incident | None = None
    failures_without_progress: int = 0
    user_errors: tuple[tuple[str, int], ...] = ()
    avoid: frozenset[str] = frozenset()
    """Nodes on which a member was lost; used last for new members until a step is committed."""
    stop_asked: bool = False
    deadline: float | None = None
    deadline_for: str = ""
    final_tries: int = 0
    ending: EndRun | None = None

    def member_of(self, rank: int) -> Member | None:
        return self.members.get(self.ranks[rank])

    def rank_of(self, member: str) -> int | None:
        return self.ranks.index(member) if member in self.ranks else None


Outcome = tuple[RunState, tuple[Any, ...]]


def rank_in_generation(state: RunState, event: Any) -> int | None:
    return state.rank_of(event.member) if event.generation == state.generation else None


def remaining(state: RunState) -> tuple[str, ...]:
    """Members of the generation that are neither gone nor out of their train function."""
    return tuple(
        name for rank, name in enumerate(state.ranks) if rank not in state.departures and name in state.members
    )


def resumed(state: RunState, generation: int, remotes: tuple[RemoteSnapshot, ...]) -> RunState:
    """A fresh state that goes on where storage says the run was."""
    return replace(state, generation=generation, remotes=remotes)


def peers(state: RunState) -> dict[str, str]:
    """For each node of the generation the node that keeps its replica; empty where replicas are off or there is one."""
    if not state.limits.replicas:
        return {}
    used = {member.node for name, member in state.members.items() if name in state.ranks}
    return peer_of([node for name, node in state.nodes.items() if name in used and node.store_ready])
