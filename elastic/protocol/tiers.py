"""What can be restored, and from where: the newest step that is complete among what survives. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A snapshot committed in node memory. ``places``: for each rank's share the nodes that hold it, owner first."""

    attempt: str
    step: int
    places: Mapping[int, tuple[str, ...]]
    live: bool = False
    """Taken after a failure, of what the survivors still held."""

    @property
    def complete(self) -> bool:
        """Whether every share still lies on some living node."""
        return all(self.places.values())

    def without(self, node: str) -> NodeSnapshot:
        """The same after ``node`` was lost."""
        places = {rank: tuple(n for n in nodes if n != node) for rank, nodes in self.places.items()}
        return replace(self, places=places)


@dataclass(frozen=True, slots=True)
class RemoteSnapshot:
    """A snapshot committed in durable storage, by its attempt. ``step`` is the one that the run goes on from."""

    attempt: str
    step: int
    run: str = ""
    """The other run that it belongs to; empty for this one's own."""
    storage: str = ""
    """Where that run is stored, if not beside this one."""
    earlier: bool = False
    """It was there when the run was started; what the run commits itself has the very same versions and code."""


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """To every rank: restore this. ``node`` where memory holds all of it; ``remote`` as the tier or the fallback."""

    step: int
    node: NodeSnapshot | None
    remote: RemoteSnapshot | None
    reason: str

    @property
    def tier(self) -> str:
        return "remote" if self.node is None else "live" if self.node.live else "node"

    @property
    def earlier(self) -> bool:
        """Whether what is restored was committed before this start of the run."""
        return self.node is None and self.remote is not None and self.remote.earlier

    @property
    def other_run(self) -> str:
        """The other run whose snapshot is restored; empty for this one's own."""
        return self.remote.run if self.node is None and self.remote is not None else ""

    @property
    def attempt(self) -> str:
        found = self.node or self.remote
        assert found is not None
        return found.attempt


def newest_restorable(snapshots: Sequence[NodeSnapshot], remotes: Sequence[RemoteSnapshot]) -> RestoreOrder | None:
    """The newest complete snapshot, node memory before durable storage at the same step, and why not a higher tier."""
    newest = max(snapshots, key=lambda s: s.step, default=None)
    complete = max((s for s in snapshots if s.complete), key=lambda s: s.step, default=None)
    remote = max(remotes, key=lambda s: s.step, default=None)
    if complete and (remote is None or complete.step >= remote.step):
        same = next((r for r in remotes if r.attempt == complete.attempt), None)
        where = "the survivors still held" if complete.live else "node memory holds"
        return RestoreOrder(complete.step, complete, same, f"{where} all of step {complete.step}")
    if remote is None:
        return None
    if newest is None:
        why = "no snapshot is in node memory"
    elif not newest.complete:
        lost = sorted(rank for rank, nodes in newest.places.items() if not nodes)
        why = f"node memory lacks the shares of ranks {lost} of step {newest.step}"
    else:
        why = f"durable storage is newer than node memory (step {newest.step})"
    return RestoreOrder(remote.step, None, remote, why)
