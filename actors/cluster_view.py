"""What Ray knows of the nodes, reduced to what a run needs: who is alive and how many ranks fit there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from actors.raylets import Raylet

HEAD_RESOURCE = "node:__internal_head__"
DOMAIN_LABEL = "elastic.domain"
"""Ray node label that names a failure domain (rack, switch, power): replicas go to another one."""


def draining_nodes() -> dict[str, float]:
    """Nodes that Ray drains, with the moment (seconds since 1970) at which each may go; 0 where there is none."""
    from ray._private.state import state

    return {node: until / 1000.0 for node, until in state.get_draining_nodes().items()}


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The living nodes: how many ranks each can carry and its domain, and where its raylet is."""

    nodes: dict[str, tuple[int, str]]
    raylets: dict[str, Raylet]


def cluster_view(resources: Mapping[str, float], drains: Collection[str] = ()) -> ClusterView:
    """What Ray knows now. A node can carry no ranks of ``resources`` if it drains.

    Counts the node's whole resources: a rank that does not get its place because others hold it starts too late and
    is placed again elsewhere.
    """
    found, raylets = {}, {}
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        have: Mapping[str, float] = node["Resources"]
        capacity = min((int(have.get(name, 0.0) / amount + 1e-9) for name, amount in resources.items()), default=0)
        labels: Mapping[str, str] = node.get("Labels") or {}
        found[node["NodeID"]] = (0 if node["NodeID"] in drains else capacity, labels.get(DOMAIN_LABEL, ""))
        raylets[node["NodeID"]] = (node["NodeManagerAddress"], node["NodeManagerPort"])
    return ClusterView(found, raylets)


def head_pin() -> dict[str, float]:
    """Resources that place an actor on the head node, where there is one: it lives as long as the cluster does."""
    if any(HEAD_RESOURCE in node["Resources"] for node in ray.nodes() if node["Alive"]):
        return {HEAD_RESOURCE: 0.001}
    return {}


def on_node(node: str) -> Any:
    """Placement on exactly this node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)
