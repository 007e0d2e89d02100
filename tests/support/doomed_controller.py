"""A controller that is killed at a chosen point of its protocol, the first time it gets there."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from actors.controller import Controller
from elastic.faults import Fault, FaultPlan, Rule


def doomed(point: str, after: int = 0) -> type:
    """A Controller for which ``point`` (a glob) is the last, after ``after`` visits. Its successor lives."""

    class Doomed(Controller):
        def __init__(self, spec: Any) -> None:
            super().__init__(spec)
            self.plan = FaultPlan(0, [Rule(point, Fault.CRASH, after=after)])
            rounds, uploads = self.snapshots.rounds, self.snapshots.uploads
            do, write, commit = rounds._do, uploads._write, rounds._before_commit

            def watched_do(state: Any, command: Any) -> None:
                self.at(f"before {type(command).__name__} of {state.purpose}")
                do(state, command)
                self.at(f"after {type(command).__name__} of {state.purpose}")

            async def watched_write(*args: Any) -> Any:
                writing = asyncio.ensure_future(write(*args))
                await asyncio.sleep(0)
                self.at("during an upload")
                return await writing

            async def watched_commit(state: Any) -> None:
                self.at(f"before the commit of {state.purpose} is in the journal")
                await commit(state)
                self.at(f"after the commit of {state.purpose} is in the journal")

            rounds._do, uploads._write = watched_do, watched_write  # type: ignore[method-assign]
            rounds._before_commit = watched_commit

        def at(self, where: str) -> None:
            if not self._successor and self.plan.at(where):
                os.kill(os.getpid(), signal.SIGKILL)

        async def perform(self, command: Any) -> None:
            self.at(f"before {type(command).__name__}")
            await super().perform(command)
            self.at(f"after {type(command).__name__}")

    return Doomed
