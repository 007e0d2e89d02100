"""Who is in the run and where: members, nodes, and the pure choices over them.

A *member* is one rank process, in or out of the current generation. Choices are functions of what they are given and
answer with a reason in words.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from elastic import mesh as meshes
from elastic.mesh import Mesh, MeshRule

STARTING, WARM, ACTIVE, UNWOUND = "starting", "warm", "active", "unwound"


@dataclass(frozen=True, slots=True)
class Member:
    """One rank process. ``phase``: starting, warm (ready, in no generation), active, or unwound (left its loop)."""

    name: str
    node: str
    phase: str = STARTING


@dataclass(frozen=True, slots=True)
class Node:
    """One node: how many ranks of this run it can carry, its store, and the domain it fails with."""

    name: str
    capacity: int
    store: str = ""
    """``starting``, ``ready``, ``refused`` (it cannot take part), or empty while there is none."""
    domain: str = ""
    refused: bool = False
    """The user's code could not be loaded here: it takes no new members."""
    store_failures: int = 0
    """Stores lost since a step was committed."""

    @property
    def store_ready(self) -> bool:
        return self.store == "ready"

    @property
    def store_starting(self) -> bool:
        return self.store == "starting"


@dataclass(frozen=True, slots=True)
class Notice:
    """Word that a node goes away; ``by``: drain, sigterm, exclude or straggler. Times are seconds on the controller's
    clock."""

    node: str
    by: str
    why: str
    at: float
    deadline: float = math.inf
    members: frozenset[str] = frozenset()
    """Members whose own process was told to end."""


@dataclass(frozen=True, slots=True)
class Evacuation:
    """What notices led to. Times are seconds on the controller's clock; -1 where it has not got so far."""

    by: str
    nodes: tuple[str, ...]
    old_world_size: int
    opened_at: float
    purpose: str = ""
    """``shrink``, ``move``, ``leave``; ``unwound`` if something else ended the generation first, ``cancelled`` if the
    word was taken back; empty while it is not decided."""
    deadline: float = math.inf
    needs_s: float = 0.0
    decided_at: float = -1.0
    out_at: float = -1.0
    """Everybody had left."""
    ended_at: float = -1.0
    """The first step after it."""
    new_world_size: int = 0


def choose_mesh(rule: MeshRule, low: int, high: int, have: int) -> tuple[Mesh | None, str]:
    """The largest mesh that ``have`` ranks can form within [low, high], and why; ranks that it does not take stay
    spare."""
    most = min(high, have)
    mesh = meshes.largest(rule, low, most)
    if mesh is None:
        return None, f"{have} ranks are ready and the smallest mesh needs {smallest(rule, low, high)}"
    spare = have - mesh.world_size
    if not spare:
        return mesh, f"all {have} ready ranks form {mesh}"
    taken = f"{mesh} takes {mesh.world_size} of {have} ready ranks"
    if mesh.world_size == high:
        return mesh, f"{taken}; at most {high} are wanted"
    stay = f"{spare} {'stays' if spare == 1 else 'stay'} spare"
    larger = meshes.smallest(rule, mesh.world_size + 1, high)
    if larger is None:
        return mesh, f"{taken}, {stay}: no mesh that is allowed is larger"
    return mesh, f"{taken}, {stay}: the next larger mesh, {larger}, needs {larger.world_size}"


def smallest(rule: MeshRule, low: int, high: int) -> int:
    """The fewest ranks within [low, high] that form a mesh."""
    mesh = meshes.smallest(rule, low, high)
    return mesh.world_size if mesh else low


def place_members(
    nodes: Iterable[Node],
    members: Iterable[Member],
    wanted: int,
    avoid: frozenset[str],
    closed: frozenset[str] = frozenset(),
) -> list[str]:
    """Nodes for up to ``wanted`` new members: the emptiest first, of these one in the emptiest failure domain; nodes to
    ``avoid`` only where nothing else is free, ``closed`` ones never.

    A node without a ready store takes none: its ranks would have nowhere to stage.
    """
    able = [node for node in nodes if node.store_ready and not node.refused and node.name not in closed]
    free = {node.name: node.capacity for node in able}
    domain = {node.name: node.domain or f"node {node.name}" for node in able}
    load, crowd = dict.fromkeys(free, 0), dict.fromkeys(domain.values(), 0)
    for member in members:
        if member.node in free:
            free[member.node] -= 1
            load[member.node] += 1
            crowd[domain[member.node]] += 1
    chosen: list[str] = []
    for _ in range(wanted):
        open_nodes = [name for name in free if free[name] > 0]
        if not open_nodes:
            break
        best = min(open_nodes, key=lambda name: (name in avoid, load[name], crowd[domain[name]], name))
        free[best] -= 1
        load[best] += 1
        crowd[domain[best]] += 1
        chosen.append(best)
    return chosen


def order_ranks(previous: tuple[str, ...], ready: Iterable[Member], world_size: int) -> tuple[str, ...]:
    """Members by rank: who was in the last generation keeps its rank where it can, newcomers fill the gaps.

    Keeping ranks keeps the placement of boxes, so that survivors restore from their own memory.
    """
    pool = {member.name: member for member in ready}
    kept = [name for name in previous if name in pool]
    fresh = sorted((name for name in pool if name not in kept), key=lambda name: (pool[name].node, name))
    ranks: list[str | None] = [name if name in pool else None for name in previous[:world_size]]
    ranks += [None] * (world_size - len(ranks))
    spill = [name for name in kept if name not in ranks] + fresh
    return tuple(name if name is not None else spill.pop(0) for name in ranks)


def peer_of(nodes: Collection[Node]) -> dict[str, str]:
    """For each node its partner for replicas: pairs, not a ring, and in another failure domain where there is one.

    Source: POLICY.md §2.3: groups survive more double losses than a ring. The two largest domains give each pair, which
    leaves the fewest nodes without a partner elsewhere. An odd node out joins a pair.
    """
    domains: dict[str, list[str]] = {}
    for node in sorted(nodes, key=lambda node: node.name, reverse=True):
        domains.setdefault(node.domain or f"node {node.name}", []).append(node.name)
    pairs: list[tuple[str, str]] = []
    while domains:
        two = sorted(domains, key=lambda domain: (-len(domains[domain]), domain))[:2]
        if len(two) < 2 and len(domains[two[0]]) < 2:
            break
        pairs.append((domains[two[0]].pop(), domains[two[-1]].pop()))
        domains = {domain: names for domain, names in domains.items() if names}
    peers = {node: partner for pair in pairs for node, partner in (pair, pair[::-1])}
    if domains and pairs:
        ((domain, (odd,)),) = domains.items()
        of = {node.name: node.domain for node in nodes}
        peers[odd] = next((name for pair in pairs for name in pair if of[name] != domain), pairs[0][0])
    return peers
