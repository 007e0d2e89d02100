"""Which nodes are not trusted with new members for a while, because they failed again and again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic.protocol.classification import HANG, INFRASTRUCTURE, OUT_OF_MEMORY
from elastic.protocol.run_events import Departure
from elastic.protocol.run_state import RunState
from policies.cooldown import cooldown_s

HELD_AGAINST = (INFRASTRUCTURE, HANG, OUT_OF_MEMORY)
"""What a node may have to do with; not the user's errors, storage, nor what was announced."""
MOST_FAILURES = 100

_COOL = "cool "


def failed_on(state: RunState, failures: Sequence[Departure], at: float) -> RunState:
    """Note a failure against each node that its signs come from, once; who failed too often is left alone."""
    nodes = dict.fromkeys(d.node for d in failures if d.node and d.failure_class in HELD_AGAINST)
    for node in nodes:
        known = (*state.node_failures, (at, node))[-MOST_FAILURES:]
        seconds, _ = cooldown_s(known, node, state.cooled.get(node, 0))
        state = replace(state, node_failures=known)
        if seconds:
            cooled = {**state.cooled, node: state.cooled.get(node, 0) + 1}
            state = replace(state, cooled=cooled).undue(_COOL + node).due(_COOL + node, at + seconds)
    return state


def cooling(state: RunState) -> frozenset[str]:
    """Nodes that are left alone now."""
    return frozenset(name.removeprefix(_COOL) for name in state.deadlines if name.startswith(_COOL))


def trusted_again(state: RunState, node: str) -> RunState:
    """A user wants the node used: what it did is forgotten."""
    failures = tuple(failure for failure in state.node_failures if failure[1] != node)
    cooled = {name: times for name, times in state.cooled.items() if name != node}
    return replace(state, node_failures=failures, cooled=cooled).undue(_COOL + node)
