"""Asks Ray's autoscaler for the nodes that the run lacks, and takes the request back. Without one nobody listens.

Ray keeps one request for the whole cluster, and each overwrites the one before. So every run leaves its own in the
cluster's key-value store, and what is asked for is the sum. Requests of runs that have no controller any more are
dropped. A request that a user made with ``ray.autoscaler.sdk`` is overwritten while a run lacks nodes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from actors.names import NAMESPACE, controller_name
from elastic.protocol.demand import demand
from elastic.protocol.run_state import RunState

log = logging.getLogger("elastic.autoscaler")

LOOK_EVERY_S = 1.0
PREFIX = "elastic-demand:"


class AutoscalerShell:
    """``resources`` are those of one rank."""

    def __init__(
        self, run: str, resources: Mapping[str, float], state: Callable[[], RunState], note: Callable[..., None]
    ) -> None:
        self._run, self._resources, self._state, self._note = run, dict(resources), state, note
        self._asked: int | None = None
        """None: a controller before this one may have asked."""

    async def follow(self) -> None:
        """Ask for what is missing, for as long as the run lives. A lack that is over within a look is not told."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._ask(demand(self._state()))

    async def take_back(self) -> None:
        """The run needs nothing any more."""
        await self._ask(0)

    async def _ask(self, ranks: int) -> None:
        if ranks == self._asked:
            return
        try:
            told = await asyncio.get_running_loop().run_in_executor(None, ask, self._run, self._resources, ranks)
        except (RayError, RuntimeError, ConnectionError) as error:
            log.warning("the autoscaler could not be asked: %s", error)
            return
        self._asked = ranks
        if told:
            log.info("asked the autoscaler for room for %d ranks", ranks)
            self._note("demand", ranks=ranks, resources=self._resources)


def ask(run: str, resources: Mapping[str, float], ranks: int) -> bool:
    """Ask for room for ``ranks`` ranks of this run; False where that changed nothing."""
    key = f"{PREFIX}{run}"
    wanted: list[dict[str, Any]] = [dict(resources)] * ranks
    if not wanted and _internal_kv_get(key) is None:
        return False
    if wanted:
        _internal_kv_put(key, json.dumps(wanted), overwrite=True)
    else:
        _internal_kv_del(key)
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[bundle for name in _runs_that_lack() for bundle in _wanted(name)])
    return True


def _runs_that_lack() -> list[str]:
    found = []
    for key in _internal_kv_list(PREFIX):
        run = key.decode().removeprefix(PREFIX)
        try:
            ray.get_actor(controller_name(run), namespace=NAMESPACE)
            found.append(run)
        except ValueError:
            _internal_kv_del(key)
    return sorted(found)


def _wanted(run: str) -> list[dict[str, Any]]:
    found = _internal_kv_get(f"{PREFIX}{run}")
    return list(json.loads(found)) if found else []
