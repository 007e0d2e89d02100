"""What is known of a run: enough to decide what it does next. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.mesh import Mesh, MeshRule
from elastic.protocol.incident import Incident
from elastic.protocol.membership import Evacuation, Member, Node, Notice, peer_of
from elastic.protocol.run_commands import EndRun
from elastic.protocol.run_events import Departure
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot, RestoreOrder
from policies.failure_budget import BUDGETS, Budget

GATHERING, FORMING, RUNNING, STOPPING, UNWINDING = "gathering", "forming", "running", "stopping", "unwinding"
FINISHING, ENDED = "finishing", "ended"


@dataclass(frozen=True, slots=True)
class Limits:
    """The part of the configuration that decides here."""

    mesh: MeshRule
    min_workers: int
    max_workers: int
    replicas: int = 1
    hot_spares: int = 0
    max_failures_without_progress: int = 5
    budgets: Mapping[str, Budget] = field(default_factory=lambda: dict(BUDGETS))
    """For each class of failure: see ``classification``."""
    seed: int = 0
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
    start_failures: int = 0
    """Members in a row that did not start."""
    ranks: tuple[str, ...] = ()
    """Members of the current or last generation, by rank."""
    mesh: Mesh | None = None
    restoring: RestoreOrder | None = None
    """What this generation restores; None: it begins afresh, and its ranks hold at the first boundary."""
    entered: Mapping[int, int] = field(default_factory=dict)
    """Share bytes of each rank that reached its first boundary."""
    at_end: Mapping[int, int] = field(default_factory=dict)
    """The step of each rank that reached the end of its steps."""
    departures: Mapping[int, Departure] = field(default_factory=dict)
    node_snapshots: tuple[NodeSnapshot, ...] = ()
    """Committed in node memory: the newest, which is all that the stores keep."""
    remotes: tuple[RemoteSnapshot, ...] = ()
    """Committed in durable storage, newest first."""
    unreadable: Mapping[str, int] = field(default_factory=dict)
    """How often an attempt could not be restored."""
    round_open: str = ""
    """Purpose of the snapshot round that is open; its end, by commit or given up, is always told."""
    round_cancelled: bool = False
    first_round_due: bool = False
    """The generation has not had its first round: the entry, or the one that makes it redundant again."""
    round_failures: int = 0
    """Rounds in a row that came to nothing and have to be tried again."""
    salvage: tuple[int, ...] | None = None
    """Ranks of which the live tier is, or was, taken after this generation; None until that is decided."""
    nodes_lost: frozenset[str] = frozenset()
    """Nodes whose memory was lost since the round was opened."""
    incident: Incident | None = None
    failures_without_progress: int = 0
    spent: Mapping[str, float] = field(default_factory=dict)
    """Tokens that are out of each budget."""
    progress_at: float = 0.0
    """Since when training is not yet committed."""
    node_failures: tuple[tuple[float, str], ...] = ()
    """When which node failed, oldest first: see ``fitness``."""
    cooled: Mapping[str, int] = field(default_factory=dict)
    """How often a node was left alone for a while."""
    user_errors: tuple[tuple[tuple[str, int], ...], ...] = ()
    """Errors of the train function and want of memory, with the steps finished before them, for each generation that
    ended with some and that no commit has got past."""
    avoid: frozenset[str] = frozenset()
    """Nodes on which a member was lost; used last for new members until a step is committed."""
    notices: tuple[Notice, ...] = ()
    """Nodes that go away, by whose word: see ``notices``."""
    needs_s: float = 0.0
    """How long a stop at a boundary took when the last notice came."""
    upload_s: float = 0.0
    """And how long an upload."""
    evacuation: Evacuation | None = None
    """What the notices of this generation lead to; None where there are none."""
    insured: bool = False
    """A durable snapshot was begun since the last new notice."""
    stop_asked: bool = False
    deadlines: Mapping[str, float] = field(default_factory=dict)
    """What is to happen when, by name: see ``course.tick``."""
    ending: EndRun | None = None

    @property
    def deadline(self) -> float | None:
        """When the next Tick is due, if nothing else happens."""
        return min(self.deadlines.values(), default=None)

    def rank_of(self, member: str) -> int | None:
        return self.ranks.index(member) if member in self.ranks else None

    def due(self, name: str, at: float) -> RunState:
        """With a deadline; one of that name that is set already stays."""
        return self if name in self.deadlines else replace(self, deadlines={**self.deadlines, name: at})

    def undue(self, *names: str) -> RunState:
        """Without these deadlines."""
        if not any(name in self.deadlines for name in names):
            return self
        return replace(self, deadlines={name: at for name, at in self.deadlines.items() if name not in names})


Outcome = tuple[RunState, tuple[Any, ...]]


def rank_in_generation(state: RunState, event: Any) -> int | None:
    """The rank that ``event`` is news of, or None if it comes from another generation."""
    return state.rank_of(event.member) if event.generation == state.generation else None


def remaining(state: RunState) -> tuple[str, ...]:
    """Members of the generation that are neither gone nor out of their train function."""
    return tuple(
        name for rank, name in enumerate(state.ranks) if rank not in state.departures and name in state.members
    )


def backoff_s(failures: int, first_s: float, most_s: float) -> float:
    """How long to wait after so many failures in a row: twice as long each time."""
    return min(most_s, first_s * 2.0 ** min(30, failures - 1))


def resumed(state: RunState, generation: int, remotes: tuple[RemoteSnapshot, ...]) -> RunState:
    """A fresh state that goes on where storage says the run was."""
    return replace(state, generation=generation, remotes=remotes)


def peers(state: RunState) -> dict[str, str]:
    """For each node of the generation the node that keeps its replica; empty where replicas are off or there is one."""
    if not state.limits.replicas:
        return {}
    used = {member.node for name, member in state.members.items() if name in state.ranks}
    nodes = [node for name, node in state.nodes.items() if name in used and node.store_ready]
    gone = {notice.node for notice in state.notices}
    stay = [node for node in nodes if node.name not in gone]
    if not stay or len(stay) == len(nodes):
        return peer_of(nodes)
    # What lies on a node that goes away has to lie on one that stays as well.
    leave = sorted(node.name for node in nodes if node.name in gone)
    found = peer_of(stay) or {stay[0].name: leave[0]}
    return found | {name: stay[number % len(stay)].name for number, name in enumerate(leave)}
