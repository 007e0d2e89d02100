"""The one shape of every protocol here: frozen state, frozen events, a literal table, commands out. Pure.

Two rules, which everything in this package obeys:

1. A machine decides and never acts. Time, randomness and facts about the cluster arrive as fields of events.
2. An event that the table does not expect raises, and nothing happens: the state is a value, so the caller still
   holds the one from before, and the error carries the story that led there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from elastic.errors import InternalError


class Phased(Protocol):
    """A state that names its phase, the first half of the key into a table."""

    @property
    def phase(self) -> str: ...


S = TypeVar("S", bound=Phased)
Handler = Callable[[S, Any], tuple[S, tuple[Any, ...]]]
Table = Mapping[tuple[str, type], Handler[S]]


def ignore(state: S, event: Any) -> tuple[S, tuple[Any, ...]]:
    """An event that arrives too late to matter in this phase, named in the table so that it is no surprise."""
    return state, ()


class Machine(Generic[S]):
    """Runs one table over one state and keeps the story: the last events, for the error that a missing key raises."""

    STORY_LENGTH = 40

    def __init__(self, name: str, table: Table[S], state: S) -> None:
        self.name, self.table, self.state = name, table, state
        self._story: list[str] = []

    def handle(self, event: Any) -> tuple[Any, ...]:
        """Advance by ``event`` and return the commands. Raises InternalError, state unchanged, where none is due."""
        key = (self.state.phase, type(event))
        handler = self.table.get(key)
        if handler is None:
            raise InternalError(
                f"{self.name}: {type(event).__name__} is not expected in phase {self.state.phase}",
                (*self._story, f"{self.state.phase} × {event}"),
            )
        before = self.state.phase
        self.state, commands = handler(self.state, event)
        self._story.append(f"{before} × {event} → {self.state.phase} {[type(c).__name__ for c in commands]}")
        del self._story[: -self.STORY_LENGTH]
        return commands

    @property
    def story(self) -> tuple[str, ...]:
        """The last events with the phases they led to, oldest first."""
        return tuple(self._story)
