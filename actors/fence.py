"""Two controllers are never obeyed at once: each has a number, and who has heard a newer one refuses the older.

A controller that Ray took for dead may be on the wrong side of a network that is cut. Its orders carry its number; the
actors of the run remember the highest that they have met, and raise Superseded to everything below. Questions that
change nothing need no number.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from ray.exceptions import RayTaskError

log = logging.getLogger("elastic.fence")

QUESTIONS = frozenset({"ping", "status", "versions", "read_prints", "pulse", "stacks", "end_rank"})
"""Methods that anybody may call."""
EXIT_SUPERSEDED = 3


class Superseded(Exception):
    """A newer controller is in charge of this actor. Never a user's concern: it ends the older controller."""

    def __init__(self, epoch: int, newest: int) -> None:
        super().__init__(epoch, newest)
        self.epoch, self.newest = epoch, newest

    def __str__(self) -> str:
        return f"controller {self.epoch} is not in charge any more: controller {self.newest} is"


class Fenced:
    """What an actor that takes orders inherits."""

    _epoch = 0
    _epoch_lock = threading.Lock()

    def ordered(self, epoch: int, method: str, *args: Any) -> Any:
        """``method(*args)`` by order of controller ``epoch``. Raises Superseded if a newer one was heard."""
        with self._epoch_lock:
            if epoch < self._epoch:
                raise Superseded(epoch, self._epoch)
            self._epoch = epoch
        return getattr(self, method)(*args)


class Ordered:
    """The handle of a Fenced actor in the hands of controller ``epoch``: ``handle.method.remote(*args)`` as ever."""

    def __init__(self, actor: Any, epoch: int) -> None:
        self.actor, self.epoch = actor, epoch

    def __getattr__(self, method: str) -> Any:
        return getattr(self.actor, method) if method in QUESTIONS else _Order(self, method)


class _Order:
    def __init__(self, handle: Ordered, method: str) -> None:
        self._handle, self._method = handle, method

    def remote(self, *args: Any) -> Any:
        return self._handle.actor.ordered.remote(self._handle.epoch, self._method, *args)


def end_if_superseded(error: BaseException) -> None:
    """End this process at once, without a word to anybody, if ``error`` says that a newer controller is in charge."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Superseded):
        log.error("%s; this one ends", error.cause)
        os._exit(EXIT_SUPERSEDED)
