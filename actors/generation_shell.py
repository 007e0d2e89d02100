"""Generations of a run, as the controller has them begun: where the ranks meet, what each is told, and whether one that
stands in doubt may go on. When one begins and with whom is decided elsewhere: see ``run_lifecycle``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from actors.cadence import Cadence
from actors.chronicle import Chronicle
from actors.cluster_view import head_pin
from actors.controller_spec import ControllerSpec
from actors.members import Members
from actors.names import NAMESPACE, rendezvous_name
from actors.rank_orders import GenerationOrder
from actors.rendezvous import Rendezvous
from actors.resume import how_to_restore
from actors.watch import kill
from elastic.clock import now
from elastic.protocol import run_lifecycle as life
from elastic.protocol.run_lifecycle import RunState


class GenerationShell:
    """``state`` gives the run as it is now, ``spawn`` runs work beside the loop."""

    def __init__(
        self,
        spec: ControllerSpec,
        *,
        state: Callable[[], RunState],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        members: Members,
        chronicle: Chronicle,
        cadence: Cadence,
    ) -> None:
        self._spec, self._state, self._spawn = spec, state, spawn
        self._members, self._chronicle, self._cadence = members, chronicle, cadence
        self._rendezvous: Any = None

    async def make_rendezvous(self) -> None:
        """Start the key-value store of the run, or find the one that a predecessor started."""
        loop = asyncio.get_running_loop()
        resources = await loop.run_in_executor(None, head_pin)
        self._rendezvous = Rendezvous.options(  # type: ignore[attr-defined]
            name=rendezvous_name(self._spec.run.name),
            namespace=NAMESPACE,
            lifetime="detached",
            resources=resources,
            runtime_env=self._spec.runtime_env,
            get_if_exists=True,
        ).remote()

    async def begin(self, command: life.BeginGeneration) -> None:
        """Give each rank its orders."""
        rendezvous = await self._rendezvous.address.remote()  # one that had died is somewhere else now
        nodes = [self._state().members[name].node for name in command.ranks]
        self._chronicle.began(command, tuple(nodes), now())
        self._cadence.resized(now(), len(set(nodes)))
        how = how_to_restore(self._spec.run, command.restore)
        for rank, name in enumerate(command.ranks):
            order = GenerationOrder(
                generation=command.generation,
                rank=rank,
                ranks=command.ranks,
                mesh=command.mesh,
                rendezvous=rendezvous,
                restore=command.restore,
                hold=command.hold,
                how=how,
                local_rank=nodes[:rank].count(nodes[rank]),
                local_world_size=nodes.count(nodes[rank]),
            )
            if name in self._members.ranks:  # else it just died, and the news is in the queue
                self._members.ranks[name].begin.remote(order)
        for name in set(self._members.ranks) - set(command.ranks):
            self._members.ranks[name].forget.remote()

    def in_doubt(self, member: str, generation: int, step: int) -> None:
        """A rank of the generation waits at ``step`` until all of its peers have answered."""
        self._spawn(self._clear_up(member, generation, step))

    async def _clear_up(self, member: str, generation: int, step: int) -> None:
        """A rank ended a turn without a step of its optimizer. It goes on when all ranks of the generation answer; who
        does not is lost, and the generation ends."""
        state = self._state()
        if generation != state.generation or state.phase not in (life.FORMING, life.RUNNING, life.STOPPING):
            return
        if await self._members.all_answer(state.ranks) and member in self._members.ranks:
            self._members.ranks[member].clear.remote(generation, step)

    def close(self) -> None:
        """End the key-value store."""
        if self._rendezvous is not None:
            kill(self._rendezvous)
