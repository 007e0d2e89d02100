"""Asks the living stores and ranks of a run what they know, for a controller that takes over.

Each is asked in the new controller's name, so that from its answer on it obeys no older one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from actors.calls import answer, first_line
from actors.fence import Ordered, end_if_superseded
from actors.names import NAMESPACE, controller_name, member_name, rendezvous_name, store_name
from actors.watch import kill
from elastic.protocol.adoption import RankFacts, StoreFacts
from elastic.protocol.membership import STARTING
from elastic.protocol.run_state import RunState

log = logging.getLogger("elastic.adoption")

ACCOUNT_TIMEOUT_S = 5.0
"""Who is alive answers within milliseconds."""


@dataclass(frozen=True, slots=True)
class Living:
    """Those that answered: their facts, the number of their first event that is not in them, and their handles."""

    stores: dict[str, tuple[StoreFacts, int, Ordered]] = field(default_factory=dict)
    ranks: dict[str, tuple[RankFacts, int, Ordered]] = field(default_factory=dict)

    @property
    def store_facts(self) -> dict[str, StoreFacts]:
        return {node: facts for node, (facts, _, _) in self.stores.items()}

    @property
    def rank_facts(self) -> dict[str, RankFacts]:
        return {member: facts for member, (facts, _, _) in self.ranks.items()}


def actors_of(run: str) -> list[str]:
    """The names of all actors of the run but its controller."""
    prefix = controller_name(run).removesuffix("controller")
    return sorted(
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE
        and actor["name"].startswith(prefix)
        and actor["name"] != controller_name(run)
    )


def stores_of(run: str) -> dict[str, Any]:
    """The handles of the run's stores, by the actors' names."""
    return _handles([name for name in actors_of(run) if name.startswith(store_name(run, ""))])


def end_all_of(run: str) -> None:
    """End every process of the run but its controller: what a controller that is gone for good has left."""
    for actor in _handles(actors_of(run)).values():
        kill(actor)


def _handles(names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        with contextlib.suppress(ValueError):  # it ended meanwhile
            found[name] = _actor(name)
    return found


def keep_in_the_run(run: str) -> None:
    """Let the stores know that there is a controller: they leave a run whose controller is gone for too long."""
    for store in stores_of(run).values():
        store.pulse.remote(-1, ())


async def ask_the_living(run: str, epoch: int, record: RunState) -> Living:
    """What stores and ranks say of themselves. Who does not answer is ended and left out, but for ranks that the
    journal knows to be starting."""
    loop = asyncio.get_running_loop()
    names = await loop.run_in_executor(None, actors_of, run)
    stores, ranks = store_name(run, ""), member_name(run, "")
    living = Living()

    async def ask(name: str) -> None:
        try:
            actor = Ordered(await loop.run_in_executor(None, _actor, name), epoch)
        except ValueError:
            return  # it ended meanwhile
        try:
            facts, following = await asyncio.wait_for(answer(actor.account.remote()), ACCOUNT_TIMEOUT_S)
        except (RayError, asyncio.TimeoutError) as error:
            end_if_superseded(error)
            member = record.members.get(name.removeprefix(ranks)) if name.startswith(ranks) else None
            if isinstance(error, asyncio.TimeoutError) and member is not None and member.phase == STARTING:
                living.ranks[member.name] = RankFacts(member.name, member.node, False), 0, actor
                return
            log.warning("%s does not answer (%s) and is ended", name, first_line(error))
            kill(actor)
            return
        if name.startswith(stores):
            living.stores[name.removeprefix(stores)] = facts, following, actor
        else:
            living.ranks[name.removeprefix(ranks)] = facts, following, actor

    await asyncio.gather(*(ask(name) for name in names if name != rendezvous_name(run)))
    return living


def _actor(name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)
