"""The course of a run: after each event, what follows from the state as it then is. Pure.

A handler only notes what happened. What is to be done about it is decided here, from the state alone, so that no
order of events can leave out a decision: ``after(handler)`` makes the entry of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic.protocol import notices
from elastic.protocol.boundaries import begin_work, leave_behind, next_round
from elastic.protocol.cluster import start_store
from elastic.protocol.departures import give_up_on, parted, settle
from elastic.protocol.endings import end_run
from elastic.protocol.gathering import gather, staff
from elastic.protocol.machine import Handler
from elastic.protocol.membership import smallest
from elastic.protocol.run_commands import CancelRound
from elastic.protocol.run_events import Late, ResizeAsked, StopAsked, Tick
from elastic.protocol.run_state import (
    ENDED,
    FINISHING,
    FORMING,
    GATHERING,
    RUNNING,
    UNWINDING,
    Outcome,
    RunState,
    remaining,
)

PATIENCE = frozenset(("cluster", "more", "form", "unwind", "return", "seal"))
"""Deadlines of waiting for what others do: see ``tick``."""


def after(handler: Callable[[RunState, Any], Outcome]) -> Handler[RunState]:
    """``handler``, and then what follows."""

    def handle(state: RunState, event: Any) -> Outcome:
        state, commands = handler(state, event)
        state, more = advance(state, event.at)
        return state, (*commands, *more)

    handle.__name__ = handler.__name__
    return handle


def advance(state: RunState, at: float) -> Outcome:
    """Everything that is due now. Doing it twice changes nothing."""
    commands: list[Any] = []
    while state.phase != ENDED:
        before = state.phase
        if state.phase not in (UNWINDING, FINISHING):
            state, more = staff(state, at)
            commands += more
        if state.phase == GATHERING:
            state, more = gather(state, at)
        elif state.phase == FORMING:
            state, more = begin_work(state, at)
        elif state.phase == RUNNING:
            state, more = next_round(state, at)
        elif state.phase == FINISHING:
            state, more = settle(state, at) if state.ending is None else (state, ())
        else:
            state, more = settle(state, at)
        commands += more
        if state.phase == UNWINDING:  # replacements warm up while the others leave; not if the run ends here
            state, more = staff(state, at)
            commands += more
        if state.phase == before:
            break
    return state, tuple(commands)


def late(state: RunState, event: Late) -> Outcome:
    """Who was waited for meanwhile may have answered and was not heard, or was not asked before the end of it."""
    later = {name: at + event.by_s if name in PATIENCE else at for name, at in state.deadlines.items()}
    return replace(state, deadlines=later), ()


def tick(state: RunState, event: Tick) -> Outcome:
    """What was due has come due.

    ``cluster``, ``more``: the wait for members (see ``gathering``). ``form``, ``unwind``: ranks had so long to enter
    or to leave. ``return``: some returned early, the others had so long to do the same. ``seal``: an open round had so
    long to end. ``retry``, ``start``, ``store <node>``: the time to try again. ``again``: the wait between failures in
    a row. ``cool <node>``: the node is used again. ``notice``, ``replaced``, ``leave``,
    ``lapse <node>``, ``slow <node>``: see ``notices``.
    """
    passed = [name for name, at in state.deadlines.items() if at <= event.at]
    state = state.undue(*(name for name in passed if name not in ("cluster", "more")))
    commands: list[Any] = []
    more: tuple[Any, ...] = ()
    for name in passed:
        if name == "form" and state.phase == FORMING:
            late = tuple(m for m in remaining(state) if state.rank_of(m) not in state.entered)
            state, more = give_up_on(state, event.at, late, "did not reach its first boundary in time")
        elif name == "unwind" and state.phase == UNWINDING and (ending := parted(state)):
            return end_run(state, ending)
        elif name == "unwind" and state.phase == UNWINDING:
            state, more = give_up_on(state, event.at, remaining(state), "did not leave the train function in time")
        elif name == "return" and state.phase != UNWINDING:
            state, more = leave_behind(state, event.at)
        elif name == "seal" and state.round_open:
            state, more = replace(state, round_cancelled=True), (CancelRound("its shares were not sealed in time"),)
        elif name.startswith("store "):
            state, more = start_store(state, name.removeprefix("store "))
        elif name.startswith("lapse "):
            state, more = notices.lapse(state, name.removeprefix("lapse "), notices.SOFT, event.at)
        elif name.startswith("slow "):
            state, more = notices.lapse(state, name.removeprefix("slow "), notices.SLOW, event.at)
        else:
            more = ()
        commands += more
    return state, tuple(commands)


def resize_asked(state: RunState, event: ResizeAsked) -> Outcome:
    """Within the limits, and not below the smallest mesh."""
    limits = state.limits
    workers = max(limits.min_workers, min(limits.max_workers, event.workers))
    return replace(state, target=max(workers, smallest(limits.mesh, limits.min_workers, limits.max_workers))), ()


def stop_asked(state: RunState, event: StopAsked) -> Outcome:
    return replace(state, stop_asked=True), ()
