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

What is known lies in ``run_state``, what comes in in ``run_events``, what goes out in ``run_commands``. The decisions:
``gathering`` (who trains next), ``boundaries`` (a generation at work), ``departures`` (how it ends), ``cluster``
(nodes, stores, members), ``endings`` (the run is over). The table below says which event is legal when.
"""

from __future__ import annotations

from elastic.protocol import boundaries, cluster, departures, endings, gathering
from elastic.protocol.machine import Table, ignore
from elastic.protocol.run_commands import (
    BeginGeneration,
    CancelRound,
    CloseIncident,
    EndRoundBeyond,
    EndRun,
    Interrupt,
    KillMember,
    MakeDurable,
    Probe,
    StartMember,
    StartRound,
    StartStore,
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
    MemberLost,
    MemberReady,
    NodeCommitted,
    NodeRefused,
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
    "Limits",
    "MakeDurable",
    "MemberLost",
    "MemberReady",
    "NodeCommitted",
    "NodeRefused",
    "Probe",
    "RemoteCommitted",
    "ResizeAsked",
    "RoundAbandoned",
    "RunState",
    "SnapshotDue",
    "StartMember",
    "StartRound",
    "StartStore",
    "StopAsked",
    "StoreLost",
    "StoreReady",
    "Tick",
    "UploadsIdle",
    "peers",
    "resumed",
]

_ALL = (GATHERING, FORMING, RUNNING, STOPPING, UNWINDING, FINISHING)
_IN_GENERATION = (FORMING, RUNNING, STOPPING, UNWINDING, FINISHING)

TABLE: Table[RunState] = {
    **{(phase, ClusterSeen): cluster.cluster_seen for phase in _ALL},
    **{(phase, StoreReady): cluster.store_ready for phase in _ALL},
    **{(phase, StoreLost): cluster.store_lost for phase in _ALL},
    **{(phase, MemberReady): cluster.member_ready for phase in _ALL},
    **{(phase, MemberLost): cluster.member_lost for phase in _ALL},
    **{(phase, EntryFailed): cluster.entry_failed for phase in _ALL},
    **{(phase, NodeRefused): cluster.node_refused for phase in _ALL},
    **{(phase, Tick): departures.tick for phase in _ALL},
    **{(phase, RemoteCommitted): boundaries.remote_committed for phase in _ALL},
    **{(phase, NodeCommitted): boundaries.node_committed for phase in _ALL},
    **{(phase, RoundAbandoned): boundaries.round_abandoned for phase in _ALL},
    **{(phase, UploadsIdle): endings.uploads_idle for phase in _ALL},
    **{(phase, Departed): departures.departed for phase in _IN_GENERATION},
    **{(phase, FirstStep): boundaries.first_step for phase in _IN_GENERATION},
    (FORMING, Formed): boundaries.formed,
    (FORMING, Entered): boundaries.entered,
    (RUNNING, SnapshotDue): boundaries.snapshot_due,
    (RUNNING, AtEnd): boundaries.at_end,
    (STOPPING, AtEnd): boundaries.at_end,
    **{(phase, ResizeAsked): gathering.resize_asked for phase in (GATHERING, RUNNING)},
    **{(phase, ResizeAsked): gathering.resize_later for phase in (FORMING, STOPPING, UNWINDING, FINISHING)},
    **{(phase, StopAsked): gathering.stop_asked for phase in (GATHERING, RUNNING)},
    **{(phase, StopAsked): gathering.stop_later for phase in (FORMING, STOPPING, UNWINDING, FINISHING)},
    # What a generation says after it ended says nothing any more.
    **{
        (phase, late): ignore
        for phase in (GATHERING, UNWINDING, FINISHING, ENDED)
        for late in (Formed, Entered, AtEnd)
    },
    **{(phase, Formed): ignore for phase in (RUNNING, STOPPING)},
    **{(phase, Entered): ignore for phase in (RUNNING, STOPPING)},
    (FORMING, AtEnd): boundaries.at_end,
    **{(phase, SnapshotDue): ignore for phase in (GATHERING, FORMING, STOPPING, UNWINDING, FINISHING, ENDED)},
    **{(phase, late): ignore for phase in (GATHERING, ENDED) for late in (Departed, FirstStep)},
    **{
        (ENDED, late): ignore
        for late in (
            ClusterSeen, EntryFailed, NodeRefused, StoreReady, StoreLost, MemberReady, MemberLost, Tick,
            RemoteCommitted, NodeCommitted, RoundAbandoned, UploadsIdle, ResizeAsked, StopAsked,
        )
    },
}  # fmt: skip
