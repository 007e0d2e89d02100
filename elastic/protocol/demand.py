"""What a run lacks, as an autoscaler is to be asked for it. Pure."""

from __future__ import annotations

from elastic.protocol import notices
from elastic.protocol.run_state import ENDED, FINISHING, RunState


def demand(state: RunState) -> int:
    """For how many ranks the cluster should have room, all nodes together, while the run has fewer than it wants; 0
    while it has all, and once it ends.

    Nodes that take no ranks have room all the same, in an autoscaler's eyes: what fits on them is asked for as well.
    """
    wanted = state.target + state.limits.hot_spares
    if state.stop_asked or state.phase in (FINISHING, ENDED) or notices.counted(state) >= wanted:
        return 0
    closed = notices.closed(state)
    useless = sum(n.capacity for n in state.nodes.values() if n.name in closed or n.refused or n.store == "refused")
    return wanted + useless
