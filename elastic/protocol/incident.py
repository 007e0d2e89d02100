"""One incident: from the first sign of a failure to the first new step, and where the time went. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first rank that failed by itself, not because a peer went away."""

    rank: int = -1
    node: str = ""
    failure_class: str = ""
    """See ``classification``."""
    traceback: str = ""


NOBODY = Culprit()


@dataclass(frozen=True, slots=True)
class Incident:
    """Times are seconds on the controller's clock; -1 where the incident has not got so far."""

    kind: str
    """``rank``, ``node``, ``hang`` or ``error``: the gravest that was seen."""
    generation: int
    old_world_size: int
    why: str
    furthest_step: int
    opened_at: float
    settled_at: float = -1.0
    begun_at: float = -1.0
    received_at: float = -1.0
    formed_at: float = -1.0
    entered_at: float = -1.0
    first_step_at: float = -1.0
    new_generation: int = -1
    new_world_size: int = 0
    restored_step: int = -1
    salvaged_at: float = -1.0
    """When the live tier was taken, or given up."""
    not_live: str = ""
    """Why the live tier was not taken."""
    collateral: bool = False
    """``why`` only says that a peer went away."""
    culprit: Culprit = NOBODY
    stacks: str = ""
    """Where the stacks of all ranks were saved before a hang was ended, relative to the run."""

    @classmethod
    def opened(
        cls,
        *,
        kind: str,
        generation: int,
        world_size: int,
        at: float,
        why: str,
        step: int,
        collateral: bool = False,
        culprit: Culprit = NOBODY,
    ) -> Incident:
        """The first sign of a failure."""
        return cls(kind, generation, world_size, why, step, at, collateral=collateral, culprit=culprit)

    def also(self, kind: str, step: int, why: str, *, collateral: bool = False, culprit: Culprit = NOBODY) -> Incident:
        """Another sign of the same failure: a loss explains the errors around it, an error those of its peers."""
        graver = ("error", "hang", "rank", "node")
        worse = graver.index(kind) > graver.index(self.kind) and (self.collateral or not collateral)
        told = worse or (self.collateral and not collateral)
        return replace(
            self.reached(step),
            kind=kind if worse else self.kind,
            why=why if told else self.why,
            collateral=collateral if told else self.collateral,
            culprit=culprit if told else self.culprit,
        )

    def since(self, at: float) -> Incident:
        """It began before it was found: what nobody tells of has to be noticed."""
        return replace(self, opened_at=min(self.opened_at, at))

    def reached(self, step: int) -> Incident:
        """A rank had finished ``step`` steps when it left."""
        return replace(self, furthest_step=max(self.furthest_step, step))

    def settled(self, at: float) -> Incident:
        """Everybody is out or gone."""
        return self if self.settled_at >= 0 and self.begun_at < 0 else replace(self, settled_at=at)

    def salvaged(self, at: float) -> Incident:
        """The live tier was taken, or came to nothing."""
        return replace(self, salvaged_at=at)

    def begun(self, at: float, generation: int, world_size: int) -> Incident:
        """The next generation begins; a failure while it forms begins another one within the same incident."""
        return replace(self, begun_at=at, new_generation=generation, new_world_size=world_size, formed_at=-1.0)

    def formed(self, at: float, took_s: float) -> Incident:
        """A process group stands, ``took_s`` after the rank was told to begin; the last rank's time counts."""
        return replace(self, received_at=max(self.received_at, at - took_s), formed_at=max(self.formed_at, at))

    def entered(self, at: float, step: int) -> Incident:
        """A rank has restored; the last rank's time counts."""
        return replace(self, entered_at=max(self.entered_at, at), restored_step=step)

    def first_step(self, at: float) -> Incident:
        """The first new step is done: the incident is over."""
        return replace(self, first_step_at=at)

    @property
    def steps_lost(self) -> int:
        """Finished steps that have to be done again."""
        return max(0, self.furthest_step - self.restored_step) if self.restored_step >= 0 else 0

    @property
    def rung(self) -> str:
        """Which rung of the ladder was taken."""
        if self.new_world_size < self.old_world_size:
            return "shrink"
        return "replace" if self.kind in ("rank", "node", "hang") else "re-enter"

    def split(self) -> dict[str, float]:
        """Seconds of each part, in order: they add up to ``rto_s``.

        detect: first sign, or the beginning of a silence, to everybody out or gone; salvage: taking the live tier;
        place: waiting for members; decide: journal and orders to the ranks; form: process groups; restore: building
        the model and restoring it; first step: that step.
        """
        marks = [
            ("detect_s", self.settled_at),
            ("salvage_s", self.salvaged_at),
            ("place_s", self.begun_at),
            ("decide_s", self.received_at),
            ("form_s", self.formed_at),
            ("restore_s", self.entered_at),
            ("first_step_s", self.first_step_at),
        ]
        parts, last = {}, self.opened_at
        for name, at in marks:
            at = max(at, last)
            parts[name] = at - last
            last = at
        return parts

    @property
    def rto_s(self) -> float:
        return self.first_step_at - self.opened_at
