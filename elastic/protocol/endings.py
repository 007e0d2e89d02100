"""How a run ends. Pure."""

from __future__ import annotations

from dataclasses import replace

from elastic.protocol.run_commands import EndRun, MakeDurable
from elastic.protocol.run_events import UploadsIdle
from elastic.protocol.run_state import ENDED, FINISHING, Outcome, RunState


def finished(state: RunState) -> Outcome:
    ending = state.ending or EndRun("finished", "the train function returned on every rank")
    return replace(state, phase=FINISHING, ending=ending), (MakeDurable(),)


def uploads_idle(state: RunState, event: UploadsIdle) -> Outcome:
    if state.ending is None:
        return state, ()
    ending = replace(
        state.ending, reason=f"{state.ending.reason}; {event.reason}" if event.reason else state.ending.reason
    )
    return end_run(state, ending)


def end_run(state: RunState, ending: EndRun) -> Outcome:
    """The run is over; whoever performs EndRun ends every process, after the last of their news was heard."""
    return replace(state, phase=ENDED, ending=ending, deadline=None, deadline_for=""), (ending,)
