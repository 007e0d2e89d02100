"""How a run ends: by finishing, by a stop, or for good because it cannot go on. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from elastic.protocol import fitness
from elastic.protocol.classification import INFRASTRUCTURE, OUT_OF_MEMORY, STORAGE
from elastic.protocol.membership import UNWOUND, WARM
from elastic.protocol.run_commands import EndRun, MakeDurable
from elastic.protocol.run_events import Departure, UploadsIdle
from elastic.protocol.run_state import ENDED, FINISHING, GATHERING, Outcome, RunState
from elastic.protocol.tiers import newest_restorable
from policies.failure_budget import jittered_backoff_s

BACKOFF_S, MOST_BACKOFF_S = 1.0, 60.0
"""Between failures in a row without a committed step: after the second, and at most."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def end_run(state: RunState, ending: EndRun) -> Outcome:
    """The run is over; whoever performs EndRun ends every process, after the last of their news was heard."""
    return replace(state, phase=ENDED, ending=ending, deadlines={}), (ending,)


def finished(state: RunState) -> Outcome:
    """Every rank returned: the run ends when its last snapshot is durable."""
    reason = "the train function returned on every rank"
    if len(state.at_end) < len(state.ranks):
        newest = newest_restorable(state.node_snapshots, state.remotes)
        kept = f"the newest snapshot is of step {newest.step}" if newest else "there is no snapshot"
        reason = f"{reason} before the end of its steps; {kept}"
    return replace(state, phase=FINISHING, ending=EndRun("finished", reason), deadlines={}), (MakeDurable(),)


def stopped(state: RunState) -> Outcome:
    """Everybody is out and a stop was asked: the run ends when its newest snapshot is durable."""
    newest = newest_restorable(state.node_snapshots, state.remotes)
    kept = newest.step if newest else 0
    lost = max((departure.step for departure in state.departures.values()), default=0) - kept
    reason = "stopped as asked"
    if lost > 0:
        reason = f"{reason}; {lost} step{'s' if lost > 1 else ''} after step {kept} could not be saved"
    ending = EndRun("stopped", reason)
    if not state.node_snapshots:
        return end_run(state, ending)
    return replace(state, phase=FINISHING, ending=ending, deadlines={}), (MakeDurable(),)


def uploads_idle(state: RunState, event: UploadsIdle) -> Outcome:
    """Durable, or not: then nobody is told that it is. What memory lost before it was durable is trained again."""
    ending = state.ending
    if ending is None:
        return state, ()
    if not event.reason:
        return end_run(state, ending)
    newest = newest_restorable(state.node_snapshots, state.remotes)
    if newest is not None and newest.node is not None and newest.remote is None:
        reason = f"{ending.reason}, but step {newest.step} is only in memory: {event.reason}"
        return end_run(state, EndRun("failed", reason, kind="snapshot"))
    if ending.status == "stopped" or (newest and newest.step >= max(state.at_end.values(), default=0)):
        return end_run(state, replace(ending, reason=f"{ending.reason}; {event.reason}"))
    lost = Departure("", -1, "lost", -1, event.at, "the last snapshot was lost before it was durable")
    state, ended = failed_once_more(replace(state, ending=None), [replace(lost, failure_class=STORAGE)], event.at)
    return end_run(state, ended) if ended else (released(state), ())


def released(state: RunState) -> RunState:
    """Everybody is out: the members are free for the next generation."""
    members = {name: replace(m, phase=WARM) if m.phase == UNWOUND else m for name, m in state.members.items()}
    return replace(state, phase=GATHERING, members=members)


def failed_once_more(
    state: RunState, failures: Sequence[Departure], at: float, kind: str = "cluster"
) -> tuple[RunState, EndRun | None]:
    """Counts a failure, ``failures`` being its signs, the first one first. The run ends with too many in a row without
    a committed step in between, or when the budget of its class is used up; otherwise it waits a while if it was not
    the first in a row."""
    first = failures[0]
    state = fitness.failed_on(state, failures, at)
    count = state.failures_without_progress + 1
    state = replace(state, failures_without_progress=count)
    if count > state.limits.max_failures_without_progress:
        reason = f"{count} failures in a row without a committed step, the last: {first.error}"
        return state, EndRun("failed", reason, kind=kind)
    state, ended = _spend(state, first, kind)
    wait_s = jittered_backoff_s(count, BACKOFF_S, MOST_BACKOFF_S, state.limits.seed + state.generation)
    return (state.due("again", at + wait_s) if wait_s and not ended else state), ended


def _spend(state: RunState, first: Departure, kind: str) -> tuple[RunState, EndRun | None]:
    """Take a token of the failure's class."""
    name = first.failure_class or INFRASTRUCTURE
    spent, borne, words = state.limits.budgets[name].spend(state.spent.get(name, 0.0))
    state = replace(state, spent={**state.spent, name: spent})
    if borne:
        return state, None
    reason = f"failures of class {name}: {words}; the last: {first.error}"
    return state, EndRun("failed", reason, first if kind == "user" else None, kind=kind)


def user_error(state: RunState, errors: Sequence[Departure], at: float) -> tuple[RunState, EndRun | None]:
    """The user's own errors of one generation, first one first: tried once more, unless one of them was met before at
    the same step, or the budget is used up."""
    signatures = tuple((_ADDRESS.sub("0x…", departure.error), departure.step) for departure in errors)
    for departure, signature in zip(errors, signatures):
        if any(signature in met for met in state.user_errors):
            reason = f"the same error at step {departure.step} twice" if departure.step >= 0 else "the same error twice"
            return state, EndRun("failed", reason, departure, deterministic=True, kind="user")
    state = replace(state, user_errors=(*state.user_errors, signatures))
    if errors[0].failure_class == OUT_OF_MEMORY:
        state = fitness.failed_on(state, errors, at)
    return _spend(state, errors[0], "user")
