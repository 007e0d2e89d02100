"""Looks for ranks that are slow by themselves, tells of them, and moves off their nodes where that is configured."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from actors.chronicle import Chronicle
from actors.notices import NoticeShell
from elastic.clock import now
from elastic.config import FailureConfig
from elastic.mesh import Mesh
from elastic.protocol import run_lifecycle as life
from elastic.protocol.run_lifecycle import RunState
from elastic.protocol.stragglers import RankWork, Straggler, Watch, look
from elastic.result import StragglerReport

log = logging.getLogger("elastic.stragglers")

LOOK_EVERY_S = 1.0


class StragglerWatch:
    """``readings`` gives the last word of every rank's work, ``alarm`` takes what a person should see."""

    def __init__(
        self,
        failures: FailureConfig,
        *,
        state: Callable[[], RunState],
        readings: Callable[[], Mapping[str, RankWork]],
        chronicle: Chronicle,
        note: Callable[..., None],
        alarm: Callable[[str], None],
        notices: NoticeShell,
    ) -> None:
        self._failures, self._state, self._readings = failures, state, readings
        self._chronicle, self._note, self._alarm, self._notices = chronicle, note, alarm, notices
        self._watch = Watch()
        self._told: set[str] = set()
        self._generation = -1
        self._groups: list[list[tuple[int, str]]] = []

    async def judge(self) -> None:
        """Look for as long as the run lives."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._look()

    def _look(self) -> None:
        state = self._state()
        if state.phase != life.RUNNING or state.mesh is None:
            return
        if self._generation != state.generation:
            self._generation, self._groups = state.generation, _peers(state.mesh, state.ranks)
            self._told.clear()
        self._watch, found = look(
            self._watch,
            now(),
            state.generation,
            self._groups,
            self._readings(),
            factor=self._failures.straggler_factor,
            window_s=self._failures.straggler_window_s,
        )
        if found is None:
            return
        for straggler in found:
            self._tell(state, straggler)
        self._told &= {straggler.member for straggler in found}

    def _tell(self, state: RunState, straggler: Straggler) -> None:
        node = state.members[straggler.member].node
        report = StragglerReport(**asdict(straggler), node=node, generation=state.generation)
        self._chronicle.straggler(report)
        self._note("straggler", **asdict(report))
        if straggler.member in self._told:
            return
        self._told.add(straggler.member)
        self._alarm(str(report))
        if self._failures.stragglers == "leave":
            self._notices.slow(node, f"rank {straggler.rank} is slow there")


def _peers(mesh: Mesh, members: Sequence[str]) -> list[list[tuple[int, str]]]:
    """Ranks that have the same to do, with their members: those of each pipeline stage."""
    stages: dict[int, list[tuple[int, str]]] = {}
    for rank, member in enumerate(members):
        stages.setdefault(mesh.place("pp", mesh.coordinate(rank))[0], []).append((rank, member))
    return list(stages.values())
