"""From nodes to a job: how a failure rate grows with scale, and what a peer's copy is worth.

A job's rate is ``n * node + common``: what fails with each node, and what fails once for all of them (fabric, storage,
control plane, software). Pure ``1/n`` scaling misses the second part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.domain import PolicyError, check_nonnegative, check_positive

__all__ = [
    "FleetRate",
    "ScalePoint",
    "double_loss_rate",
    "fit_fleet",
    "goodput_at_scale",
    "groups_survive",
    "ring_survives",
    "triple_loss_rate",
]


@dataclass(frozen=True, slots=True)
class FleetRate:
    """Failures per second: ``node_per_s`` for each node and ``common_per_s`` for the job as a whole."""

    node_per_s: float
    common_per_s: float = 0.0

    def job_per_s(self, nodes: float) -> float:
        """The failures per second of a job on ``nodes`` nodes."""
        return nodes * self.node_per_s + self.common_per_s

    def mtbf_s(self, nodes: float) -> float:
        """The mean seconds between failures of a job on ``nodes`` nodes."""
        return 1 / self.job_per_s(nodes)


def fit_fleet(points: Sequence[tuple[float, float]]) -> FleetRate:
    """The rates through two or more (nodes, mtbf_s) points by least squares on relative error, neither below 0."""
    if len(points) < 2 or len({nodes for nodes, _ in points}) < 2:
        raise PolicyError("E_TOO_FEW", "a node rate and a common rate need the MTBF at two different node counts")
    # Weighted by the MTBF, each row reads (n node + common) mtbf = 1.
    xx = xy = yy = x1 = y1 = 0.0
    for nodes, mtbf in points:
        x, y = check_positive("nodes", nodes) * check_positive("mtbf_s", mtbf), mtbf
        xx, xy, yy, x1, y1 = xx + x * x, xy + x * y, yy + y * y, x1 + x, y1 + y
    determinant = xx * yy - xy * xy
    node, common = (yy * x1 - xy * y1) / determinant, (xx * y1 - xy * x1) / determinant
    if common < 0:
        node, common = x1 / xx, 0.0
    elif node < 0:
        node, common = 0.0, y1 / yy
    return FleetRate(node, common)


def double_loss_rate(node_per_s: float, nodes: int, exposed_s: float, *, ring: bool = False) -> float:
    """How often both holders of a copy are lost before it is copied again, per second, if losses are independent.

    ``exposed_s`` is the time until a lost node's shards are replicated anew. Pairs: ``n l^2 w``; in a ring (i keeps
    i-1) twice that. Correlated losses are far more frequent: LANL's logs show 1.0 to 5.7 % of failures hitting two
    nodes within a minute.
    """
    check_nonnegative("exposed_s", exposed_s)
    return (2 if ring else 1) * nodes * node_per_s**2 * exposed_s


def triple_loss_rate(node_per_s: float, nodes: int, exposed_s: float) -> float:
    """The same for groups of three: ``2 n l^3 w^2``."""
    return 2 * nodes * math.pow(node_per_s, 3) * math.pow(exposed_s, 2)


def groups_survive(nodes: int, lost: int) -> float:
    """The probability that ``lost`` random nodes of ``nodes`` hold no whole pair: ``C(N/2,k) 2^k / C(N,k)``."""
    return float(math.comb(nodes // 2, lost) * 2**lost / math.comb(nodes, lost))


def ring_survives(nodes: int, lost: int) -> float:
    """The same where node i keeps a copy of node i-1: no two neighbours lost, ``N/(N-k) C(N-k,k) / C(N,k)``."""
    if 2 * lost > nodes:
        return 0.0
    return nodes / (nodes - lost) * math.comb(nodes - lost, lost) / math.comb(nodes, lost)


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The best achievable goodput at one node count, and what a better snapshot would change.

    ``half_cost`` and ``free`` are the goodput with half the visible cost and latency, and with none: the gap to
    ``free`` is all that any snapshot can still win; what is missing above ``free`` only faster restarts or fewer
    failures bring.
    """

    nodes: int
    mtbf_s: float
    interval_s: float
    k: int
    goodput: float
    half_cost: float
    free: float


def goodput_at_scale(
    node_counts: Sequence[int],
    rate: FleetRate,
    best: Callable[[float, float], tuple[float, int, float]],
) -> tuple[ScalePoint, ...]:
    """A ``ScalePoint`` for each node count.

    ``best(mtbf_s, cost_factor)`` answers (interval_s, k, efficiency) of the best policy when every cost of saving is
    multiplied by ``cost_factor``; 0 means saves that cost nothing.
    """
    points = []
    for nodes in node_counts:
        mtbf = rate.mtbf_s(check_positive("nodes", nodes))
        interval, k, value = best(mtbf, 1.0)
        points.append(
            ScalePoint(nodes, mtbf, interval, k, value, half_cost=best(mtbf, 0.5)[2], free=best(mtbf, 0.0)[2])
        )
    return tuple(points)
