"""The things of a made-up cluster, and their clock: see ``made_up_run``."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from support.made_up_gate import GateModel

from elastic.protocol import run_lifecycle as life
from elastic.protocol import snapshot_round as rounds
from elastic.protocol.machine import Machine
from elastic.protocol.run_state import Limits, RunState
from elastic.protocol.shares import ShareReport


class Broken(AssertionError):
    """Something that must hold does not."""


@dataclass(slots=True)
class Trouble:
    """What goes wrong in one history; probabilities are per occasion."""

    rank_kills: int = 0
    node_kills: int = 0
    store_kills: int = 0
    joins: int = 0
    requests: int = 0
    notices: int = 0
    """Nodes that are told to go away: they do so at their deadline, or the word is taken back."""
    slots_refused: float = 0.0
    seals_failed: float = 0.0
    uploads_failed: float = 0.0
    starts_failed: float = 0.0
    restores_failed: float = 0.0
    error_steps: tuple[int, ...] = ()
    """Steps at which every rank raises, always."""
    errors_once: int = 0
    early_returns: tuple[int, ...] = ()
    """Ranks that leave the loop in their third step."""
    capture_fails: bool = False
    controller_kills: int = 0
    journal_fails: float = 0.0


@dataclass(slots=True)
class Shares:
    """What one store holds of one attempt."""

    step: int
    ranks: set[int] = field(default_factory=set)
    pins: int = 0
    closed: bool = False
    """Given back but for an upload that still reads it."""
    opened: rounds.RoundState | None = None
    reports: dict[int, ShareReport] = field(default_factory=dict)
    sealed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    world_size: int = 0


@dataclass(slots=True)
class StoreProcess:
    node: str
    alive: bool = True
    generation: int = 0
    held: dict[str, Shares] = field(default_factory=dict)
    committed: str = ""
    said_at: float = 0.0
    said: int = 0
    accounted: int = 0
    """What was said before does not reach a controller any more: it has learned it otherwise."""
    epoch: int = 0


@dataclass(slots=True)
class NodeMachine:
    name: str
    capacity: int
    domain: str
    alive: bool = True
    store: StoreProcess | None = None
    drains: bool = False


@dataclass(slots=True)
class RankProcess:
    name: str
    node: NodeMachine
    alive: bool = True
    heard: bool = True
    generation: int = -1
    gate: GateModel = field(default_factory=GateModel)
    orders: list[Any] = field(default_factory=list)
    order: Any = None
    at: str = "idle"
    """idle, meeting, building, arrive, hold, step, blocked, staging, after, out"""
    step: int = 0
    first: bool = True
    said_at: float = 0.0
    told_at: float = 0.0
    in_group: bool = False
    returned: bool = False
    said: int = 0
    accounted: int = 0
    epoch: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    """See ``RankFacts``: of the generation in hand."""


POINTS = (
    "before the decision", "StartStore", "StartMember", "_rank_begin", "BeginGeneration", "_interrupt", "Interrupt",
    "StartRound", "OpenSlots", "NameBoundary", "Propose", "_propose", "before Confirm", "after Confirm", "_confirm",
    "before the commit is", "after the commit is", "a store was told", "CommitNodeTier", "RoundEnded", "ReleaseRanks",
    "_release", "AbandonShares", "told to abandon", "StartSalvage", "StageLive", "_stage_live", "KillMember", "Probe",
    "CloseIncident", "MakeDurable", "EndRun", "CancelRound", "EndRoundBeyond", "of final", "of stop", "of grow",
    "of shrink", "of live", "of entry", "of periodic", "of redundancy", "an adopted commit",
)  # fmt: skip
"""Parts of the names of points: where a controller may be killed."""


class Killed(Exception):
    """The controller was killed here."""


class World:
    """What there is, and what happens next. ``seed`` decides everything."""

    def __init__(self, seed: int, *, trouble: Trouble | None = None, nodes: int = 0, steps: int = 0) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.trouble = trouble if trouble is not None else any_trouble(self.random)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.counter = 0
        self.nodes: dict[str, NodeMachine] = {}
        self.ranks: dict[str, RankProcess] = {}
        self.controller_ranks: dict[str, RankProcess] = {}
        self.controller_stores: dict[str, StoreProcess] = {}
        self.until_step = steps or self.random.randint(1, 12)
        self.step_s = self.random.choice((0.02, 0.2, 2.0))
        self.lockstep = self.random.random() < 0.8
        self.slow = self.random.choice((1.0, 1.0, 1.0, 10.0, 100.0))
        self.every_s = self.random.choice((0.3, 1.0, 5.0, 1e9))
        self.round: Machine[rounds.RoundState] | None = None
        self.round_at: dict[str, Any] = {}
        self.round_ended: set[str] = set()
        self.attempts = 0
        self.committed: dict[str, tuple[int, int]] = {}
        """Attempt: step and world size, from the moment of the commit."""
        self.remote: dict[str, int] = {}
        self.upload: str = ""
        self.newest: rounds.RoundState | None = None
        self.done_step = -1
        self.finishing = False
        self.met: dict[int, set[str]] = {}
        self.errors_left = self.trouble.errors_once
        self.events = 0
        self.seen: dict[str, tuple[int, str]] = {}
        self.stop_asked_at: float | None = None
        self.ended: life.EndRun | None = None
        self.incidents: list[Any] = []
        self.evacuations: list[Any] = []
        self.queue_until = 0.0
        self.tick_at: float | None = None
        self.restores: list[tuple[int, int]] = []
        self.reached: set[str] = set()
        low = self.random.randint(1, 2)
        high = self.random.randint(low, 4)
        size = nodes or self.random.randint(1, 4)
        self.mesh = self.random.choice(({"dp": -1}, {"dp": -1}, {"dp": -1, "tp": 2 if high >= 2 else 1}))
        self.limits = Limits(
            self.mesh,
            low,
            high,
            replicas=self.random.randint(0, 1),
            hot_spares=random.Random(f"spares {seed}").choice((0, 0, 1, 2)),
            unwind_timeout_s=10.0,
            form_timeout_s=120.0,
            wait_for_workers_s=self.random.choice((0.0, 10.0)),
            wait_for_cluster_s=600.0,
        )
        self.machine: Machine[RunState] = Machine("run", life.TABLE, RunState(self.limits, target=high))
        for number in range(size):
            self._add_node(number)
        self.generation_seen = 0
        self.epoch = 1
        self.down = False
        self.killer = random.Random(seed ^ 0x5EED)
        self.kill_targets = [
            (self.killer.choice(POINTS), self.killer.choice((1, 1, 2, 3, 6)))
            for _ in range(self.trouble.controller_kills)
        ]
        self.adoptions = 0
        self.killed_at: list[str] = []
        self.journal = ""
        self.decided: set[str] = set()
        self.starting: dict[str, str] = {}

    def point(self, where: str) -> None:
        """The controller may be killed here: at the chosen visit of each chosen kind of point."""
        for number, (kind, left) in enumerate(self.kill_targets):
            if kind in where:
                self.kill_targets[number] = (kind, left - 1)
        if any(left == 0 and kind in where for kind, left in self.kill_targets):
            self.killed_at.append(where)
            raise Killed(where)

    def soon(self, delay: float, act: Callable[..., None], *args: Any) -> None:
        """Something that the controller does, if it is still there by then."""
        self.later(delay, self._if_there, self.epoch, act, args)

    def _if_there(self, epoch: int, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if epoch == self.epoch and not self.down:
            act(*args)

    def later(self, delay: float, act: Callable[..., None], *args: Any) -> None:
        self.counter += 1
        heapq.heappush(self.heap, (self.now + delay, self.counter, act, args))

    def latency(self) -> float:
        draw = self.random.random()
        return 0.001 * self.slow if draw < 0.6 else draw * 0.02 * self.slow if draw < 0.97 else 0.5 * self.slow * draw

    def broken(self, why: str) -> None:
        story = "\n  ".join(line[:420] for line in self.machine.story[-30:])
        state = self.machine.state
        ranks = "\n  ".join(
            f"{r.name} on {r.node.name} alive={r.alive} g{r.generation} {r.at} step {r.step} gate {r.gate}"
            for r in self.ranks.values()
        )
        round_state = self.round.state if self.round else None
        raise Broken(f"seed {self.seed}: {why}\n{self.trouble}\n  {story}\n{state}\n  {ranks}\n{round_state}")


def any_trouble(draw: random.Random) -> Trouble:
    """Anything from nothing at all to everything at once."""
    kind = draw.random()
    if kind < 0.1:
        return Trouble()

    def some(most: int, chance: float) -> int:
        return draw.randint(1, most) if draw.random() < chance else 0

    def rate(most: float, chance: float) -> float:
        return draw.random() * most if draw.random() < chance else 0.0

    return replace(
        Trouble(),
        rank_kills=some(3, 0.5),
        node_kills=some(2, 0.4),
        store_kills=some(1, 0.25),
        joins=some(2, 0.3),
        requests=some(3, 0.5),
        notices=some(3, 0.3),
        slots_refused=rate(0.5, 0.2),
        seals_failed=rate(0.3, 0.2),
        uploads_failed=rate(1.0, 0.2),
        starts_failed=rate(0.5, 0.2),
        restores_failed=rate(0.3, 0.1),
        error_steps=(draw.randint(0, 9),) if draw.random() < 0.1 else (),
        errors_once=some(2, 0.15),
        early_returns=(draw.choice(((0,), (0, 1), (0, 1, 2, 3)))) if draw.random() < 0.07 else (),
    )
