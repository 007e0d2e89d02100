"""The life of a run: who trains, in which generation, from which state. Pure.

                       ┌──────────────── too few members ◀──────────────┐
                       ▼                                                │
    start ──▶ GATHERING ──enough──▶ FORMING ──all entered──▶ RUNNING    │
                                      │                       │  │      │
                                      │     grow, resize, stop│  │loss, error
                                      │                       ▼  │      │
                                      │               STOPPING   │      │
                                      │  loss, error      │      │      │
                                      └───────────────┬───┴──────┘      │
                                                      ▼                 │
                                                  UNWINDING ──────next generation
    RUNNING ──all at the end──▶ FINISHING ──durable──▶ ENDED

One number, the generation, only grows: whatever comes from an older one is ignored here and refused by the ranks and
stores. Every loss, error or voluntary stop goes through UNWINDING, where the run waits until each member of the
generation has left its train function or is gone; only then is the next generation chosen.

What is known lies in ``run_state``, what comes in in ``run_events``, what goes out in ``run_commands``. What happens is
noted in ``cluster`` (nodes, stores, members), ``notices`` (nodes that will go), ``boundaries`` (a generation at work)
and ``departures`` (how it ends); ``course`` decides what follows, with ``gathering`` (who trains next) and ``endings``
(the run is over). The table below says which event is legal when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.protocol import boundaries, cluster, course, departures, endings, notices
from elastic.protocol.course import after
from elastic.protocol.machine import Table, ignore
from elastic.protocol.run_commands import (
    BeginGeneration,
    CancelRound,
    CloseIncident,
    CloseNotice,
    EndRoundBeyond,
    EndRun,
    Interrupt,
    KillMember,
    MakeDurable,
    Probe,
    Quarantine,
    StartMember,
    StartRound,
    StartSalvage,
    StartStore,
    Warn,
)
from elastic.protocol.run_events import (
    AtEnd,
    ClusterSeen,
    Departed,
    Departure,
    Entered,
    EntryFailed,
    FirstStep,
    Formed,
    Late,
    MemberLost,
    MemberReady,
    NodeCommitted,
    NodeLeaving,
    NodeRefused,
    NodeStaying,
    RanksHung,
    RemoteCommitted,
    ResizeAsked,
    RoundAbandoned,
    SnapshotDue,
    StopAsked,
    StoreLost,
    StoreReady,
    Tick,
    UploadsIdle,
)
from elastic.protocol.run_state import (
    ENDED,
    FINISHING,
    FORMING,
    GATHERING,
    RUNNING,
    STOPPING,
    UNWINDING,
    Limits,
    Outcome,
    RunState,
    peers,
    resumed,
)

__all__ = [
    "ENDED",
    "FINISHING",
    "FORMING",
    "GATHERING",
    "RUNNING",
    "STOPPING",
    "TABLE",
    "UNWINDING",
    "AtEnd",
    "BeginGeneration",
    "CancelRound",
    "CloseIncident",
    "CloseNotice",
    "ClusterSeen",
    "Departed",
    "Departure",
    "EndRoundBeyond",
    "EndRun",
    "Entered",
    "EntryFailed",
    "FirstStep",
    "Formed",
    "Interrupt",
    "KillMember",
    "Late",
    "Limits",
    "MakeDurable",
    "MemberLost",
    "MemberReady",
    "NodeCommitted",
    "NodeLeaving",
    "NodeRefused",
    "NodeStaying",
    "Probe",
    "Quarantine",
    "RanksHung",
    "RemoteCommitted",
    "ResizeAsked",
    "RoundAbandoned",
    "RunState",
    "SnapshotDue",
    "StartMember",
    "StartRound",
    "StartSalvage",
    "StartStore",
    "StopAsked",
    "StoreLost",
    "StoreReady",
    "Tick",
    "UploadsIdle",
    "Warn",
    "peers",
    "resumed",
]

_ALL = (GATHERING, FORMING, RUNNING, STOPPING, UNWINDING, FINISHING)
_TRAINING = (FORMING, RUNNING, STOPPING)
_RESTING = (GATHERING, UNWINDING, FINISHING)
_IN_GENERATION = (*_TRAINING, UNWINDING, FINISHING)

_ALWAYS: dict[type, Callable[[RunState, Any], Outcome]] = {
    ClusterSeen: cluster.cluster_seen,
    StoreReady: cluster.store_ready,
    StoreLost: cluster.store_lost,
    MemberReady: cluster.member_ready,
    MemberLost: cluster.member_lost,
    RanksHung: cluster.ranks_hung,
    EntryFailed: cluster.entry_failed,
    NodeRefused: cluster.node_refused,
    NodeLeaving: notices.node_leaving,
    NodeStaying: notices.node_staying,
    Tick: course.tick,
    Late: course.late,
    ResizeAsked: course.resize_asked,
    StopAsked: course.stop_asked,
    RemoteCommitted: boundaries.remote_committed,
    NodeCommitted: boundaries.node_committed,
    RoundAbandoned: boundaries.round_abandoned,
    UploadsIdle: endings.uploads_idle,
}

TABLE: Table[RunState] = {
    **{(phase, event): after(handler) for event, handler in _ALWAYS.items() for phase in _ALL},
    **{(phase, Departed): after(departures.departed) for phase in _IN_GENERATION},
    **{(phase, FirstStep): after(boundaries.first_step) for phase in _TRAINING},
    **{(phase, AtEnd): after(boundaries.at_end) for phase in _TRAINING},
    (FORMING, Formed): after(boundaries.formed),
    (FORMING, Entered): after(boundaries.entered),
    (RUNNING, SnapshotDue): after(boundaries.snapshot_due),
    # What a generation says after it ended says nothing any more; nor does anything after the end of the run.
    **{(phase, late): ignore for phase in (RUNNING, STOPPING) for late in (Formed, Entered)},
    **{(phase, late): ignore for phase in _RESTING for late in (Formed, Entered, FirstStep, AtEnd)},
    **{(phase, SnapshotDue): ignore for phase in (GATHERING, FORMING, STOPPING, UNWINDING, FINISHING)},
    (GATHERING, Departed): ignore,
    **{(ENDED, late): ignore for late in (*_ALWAYS, Departed, FirstStep, AtEnd, Formed, Entered, SnapshotDue)},
}
