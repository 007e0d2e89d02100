"""What the online loop can be told. ``t`` is the run's own clock in seconds and never falls."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Failed", "Observation", "Resized", "Restored", "Running", "Saved", "Slowed", "Written"]


@dataclass(frozen=True, slots=True)
class Saved:
    """Training stood still for ``stall_s``; ``remote`` says that the save also goes to the remote tier."""

    t: float
    stall_s: float
    remote: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """A save became durable in ``tier`` (``"node"`` or ``"remote"``) ``seconds`` after its capture."""

    t: float
    seconds: float
    tier: str = "node"


@dataclass(frozen=True, slots=True)
class Slowed:
    """Training lost ``share`` of its speed while a write to ``tier`` ran: one minus step time without over with."""

    t: float
    share: float
    tier: str = "node"


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure of class ``process``, ``node`` or ``domain``. Others (``user``, ``noticed``) do not count."""

    t: float
    failure_class: str


@dataclass(frozen=True, slots=True)
class Restored:
    """Training goes on ``seconds`` after a failure of this class."""

    t: float
    seconds: float
    failure_class: str = "process"


@dataclass(frozen=True, slots=True)
class Running:
    """``node_s`` node-seconds of training since the last such observation, and the step time if it is known."""

    t: float
    node_s: float
    step_time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Resized:
    """The run goes on with ``nodes`` nodes."""

    t: float
    nodes: int


Observation = Saved | Written | Slowed | Failed | Restored | Running | Resized
