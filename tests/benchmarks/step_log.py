"""What the toy job wrote down, and what follows from it: recoveries, lost steps, goodput, samples.

An attempt is one call of the train function on all ranks: a generation of ours, a worker group of Ray Train. Attempts
are named by the moment they were entered, so the newer one has the greater name. A step is finished when any rank's
optimizer has taken it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Record:
    """One line; see ``toy_job``."""

    kind: str
    at: float
    step: int
    attempt: float
    rank: int
    world_size: int
    pid: int = 0
    node: str = ""
    began: float = 0.0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Recovery:
    """From an event to the first finished step of a newer attempt."""

    to_first_step_s: float
    stall_s: float
    """From the last step that was finished before to the first one after, that step included."""
    steps_lost: int
    """Finished steps that had to be taken again."""
    world_size: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The steps that the state at the end went through: finished ones, each from the last attempt that took it."""

    steps: dict[int, Record] = field(default_factory=dict)
    steps_redone: int = 0

    @property
    def time_in_steps_s(self) -> float:
        return sum(step.at - step.began for step in self.steps.values())


class StepLog:
    """The file, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.records: list[Record] = []

    def read(self) -> list[Record]:
        """All records so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                values = json.loads(line)
                self.records.append(Record(**{**values, "ids": tuple(values.get("ids", ()))}))
        return self.records


def furthest(records: Iterable[Record]) -> int:
    """The furthest step that any attempt finished."""
    return max((record.step for record in records if record.kind == "did"), default=0)


def recovery(records: Sequence[Record], event_at: float) -> Recovery | None:
    """What the event at ``event_at`` came to; None while no newer attempt has finished a step."""
    did = [record for record in records if record.kind == "did"]
    before = [record for record in did if record.attempt <= event_at]
    after = [record for record in did if record.attempt > event_at]
    if not before or not after:
        return None
    first = min(after, key=lambda record: record.at)
    return Recovery(
        to_first_step_s=first.at - event_at,
        stall_s=first.at - max(record.at for record in before),
        steps_lost=max(0, furthest(before) - first.step + 1),
        world_size=first.world_size,
    )


def trajectory(records: Iterable[Record], until: float) -> Trajectory:
    """The surviving steps at ``until``. An attempt that begins at a step undoes what older ones did from there on."""
    seen = [record for record in records if record.at <= until and record.kind in ("took", "did")]
    kept: dict[int, Record] = {}
    redone = 0
    for attempt in sorted({record.attempt for record in seen}):
        of = [record for record in seen if record.attempt == attempt]
        first = min(record.step for record in of)
        undone = [step for step in kept if step >= first]
        redone += len(undone)
        for step in undone:
            del kept[step]
        for record in sorted((record for record in of if record.kind == "did"), key=lambda record: -record.rank):
            kept[record.step] = record
    return Trajectory(kept, redone)


def samples_of(records: Iterable[Record], kept: Trajectory, order: Sequence[int]) -> tuple[int, int]:
    """(repeated, skipped): samples that ``kept`` holds beyond their first time, and those of ``order`` passed over."""
    steps = {(step, record.attempt) for step, record in kept.steps.items()}
    taken = [i for r in records if r.kind == "took" and (r.step, r.attempt) in steps for i in r.ids]
    position = {sample: index for index, sample in enumerate(order)}
    reached = max((position[sample] + 1 for sample in taken), default=0)
    return len(taken) - len(set(taken)), reached - len(set(taken))
