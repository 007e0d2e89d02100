"""One pending call on an actor: its news, and within milliseconds its death.

An actor that is only unavailable is asked again; it is dead when Ray says so, or when it leaves every probe
unanswered. Whoever is given up on is killed, so that it cannot come back and write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from actors.calls import first_line
from actors.death import Death, death_of
from actors.fence import end_if_superseded

POLL_S = 20.0
PROBES = 2


async def watch(
    actor: Any,
    on_event: Callable[[Any], None],
    probe: Callable[[], Any],
    probe_timeout_s: float,
    node_dead: Callable[[], Awaitable[bool]],
    after: int = 0,
    told: Callable[[], tuple[Any, ...]] = tuple,
) -> Death:
    """Deliver the actor's news, from number ``after`` on, until it dies; returns why. ``probe`` makes the call that
    proves life, ``node_dead`` see ``answers``; ``told`` is what the actor is told whenever it is asked."""
    while True:
        try:
            following, events = await actor.poll.remote(after, POLL_S, *told())
            for event in events:
                on_event(event)
            after = following
        except ActorUnavailableError as error:
            if not await answers(probe, probe_timeout_s, node_dead()):
                return Death(f"it does not answer ({first_line(error)})")
        except RayError as error:
            end_if_superseded(error)
            return death_of(error)


async def answers(probe: Callable[[], Any], timeout_s: float, node_dead: Awaitable[bool]) -> bool:
    """Whether the actor answers a probe within ``timeout_s``; at once not if its node is found to be dead meanwhile."""
    asked = asyncio.ensure_future(_answers(probe, timeout_s))
    looking = asyncio.ensure_future(node_dead)
    try:
        await asyncio.wait({asked, looking}, return_when=asyncio.FIRST_COMPLETED)
        if looking.done() and looking.result():
            return False
        return await asked
    finally:
        asked.cancel()
        looking.cancel()


async def _answers(probe: Callable[[], Any], timeout_s: float) -> bool:
    for _ in range(PROBES):
        try:
            await asyncio.wait_for(asyncio.wrap_future(probe().future()), timeout_s / PROBES)
            return True
        except (RayError, asyncio.TimeoutError):
            continue
    return False


def kill(actor: Any) -> None:
    """End the actor's process; one that is gone already is no error."""
    with contextlib.suppress(RayError, ValueError):
        ray.kill(getattr(actor, "actor", actor), no_restart=True)
