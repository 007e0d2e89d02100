"""Which rows of metrics a generation that is over still owes, and who can tell them. Pure.

Metrics are rank 0's. It may be lost, or have been behind its peers when the generation ended; each finished step that
counts has a row all the same: another rank's, which came as far.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.protocol.run_state import ENDED, GATHERING, RunState
from elastic.protocol.tiers import newest_restorable


@dataclass(frozen=True, slots=True)
class LastRows:
    """Rows of the steps after ``after`` up to ``step``. ``ranks`` are asked in this order until all are there."""

    generation: int
    after: int
    step: int
    ranks: tuple[tuple[int, str], ...]
    """Rank and member."""


def rows_owed(before: RunState, after: RunState, noted: tuple[int, int]) -> LastRows | None:
    """What to ask when a generation ended between the two states; None where there is nothing to ask. ``noted``:
    generation and step of the newest row that is known."""
    over = after.generation > before.generation or after.phase in (GATHERING, ENDED)
    newest = newest_restorable(after.node_snapshots, after.remotes)
    if before.phase in (GATHERING, ENDED) or not over or newest is None:
        return None
    began = before.restoring.step if before.restoring else 0
    known = noted[1] if noted[0] == before.generation else began
    if newest.step <= known:
        return None
    reached = {rank: departure.step for rank, departure in before.departures.items()}
    order = sorted(enumerate(before.ranks), key=lambda place: (place[0] != 0, -reached.get(place[0], newest.step)))
    return LastRows(before.generation, known, newest.step, tuple(place for place in order if place[1] in after.members))
