"""The ledger: what every rank consumed at every step, and the audit that proves it over all generations.

A row is written when the step that consumed it has ended. Its digest is made of the sample ids that were really
delivered, so the audit does not believe the planner: it recomputes the order and compares.

Which rows count. A generation that begins at step ``s`` took over from the state before ``s``: rows of older
generations from ``s`` on are void, their work was thrown away. What is left is the surviving trajectory. It must
tile the order without gap or overlap, whatever the numbers of ranks were.

A rank that dies may take its last rows with it, while its peers finished the step that it took part in (a step ends
on no rank before its gradients have been summed over all). Such a part is counted as *attested* if the row of a
peer of that generation says how many ranks there were, the rank has no later row, and a later generation took over.
Any other gap is a fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

import numpy as np
import xxhash

from elastic.data.order import Ids, SampleOrder, cut
from elastic.errors import ConfigError

__all__ = ["Audit", "LedgerEntry", "LedgerRow", "audit", "decode_row", "digest_of", "encode_row"]

_MOST_FAULTS = 100
_BLOCK = 8192


def digest_of(ids: Ids) -> str:
    """Return the xxh64 of the ids as little-endian int64, 16 hexadecimal digits."""
    return xxhash.xxh64_hexdigest(np.ascontiguousarray(ids, dtype="<i8").data)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What this rank consumed at one step: global positions ``start`` to ``stop``, and the digest of the ids there."""

    start: int
    stop: int
    digest: str
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """What data-parallel rank ``rank`` of ``dp_size`` consumed at ``step`` in ``generation``."""

    generation: int
    step: int
    rank: int
    dp_size: int
    start: int
    stop: int
    digest: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Audit:
    """What the rows prove. Clean if ``faults`` is empty; then nothing was repeated or skipped.

    ``steps`` and ``samples`` are those of the surviving trajectory, ``repeated`` and ``skipped`` count samples in it.
    ``attested`` samples have no row of their own: peers prove that the step happened. ``redone_steps`` were executed
    again after a failure, which costs time but no sample.
    """

    steps: int
    samples: int
    tokens: int
    repeated: int
    skipped: int
    attested: int
    redone_steps: int
    generations: int
    faults: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not self.faults


def encode_row(row: LedgerRow) -> str:
    """Return the row as one short string for the journal: its fields, in order, with spaces between."""
    return " ".join(str(value) for value in astuple(row))


def decode_row(encoded: str) -> LedgerRow:
    """Return the row that ``encode_row`` wrote.

    Raises ConfigError if the string is not such a row.
    """
    try:
        *head, digest, tokens = encoded.split(" ")
        generation, step, rank, dp_size, start, stop = map(int, head)
        return LedgerRow(generation, step, rank, dp_size, start, stop, digest, int(tokens))
    except (AttributeError, ValueError) as error:
        raise ConfigError("ledger row", encoded, "is no row; the journal is damaged") from error


def audit(
    rows: Iterable[LedgerRow],
    order: SampleOrder,
    global_batch_size: int,
    *,
    first_step: int | None = None,
    first_position: int = 0,
    last_step: int | None = None,
    end_position: int | None = None,
    last_generation: int | None = None,
) -> Audit:
    """Check that the surviving trajectory consumed every position of ``order`` exactly once, step by step.

    ``first_step`` (default: the lowest in the rows) begins at ``first_position``; each step takes
    ``global_batch_size`` positions, the last one fewer if ``end_position`` says where the data ends. ``last_step``
    is the last one that the run says it finished, ``last_generation`` the last one that it formed (default: the highest
    in the rows). Rows that several ranks wrote
    alike for one data-parallel rank (tensor-parallel peers) count once.
    """
    found = _Findings()
    unique = _without_copies(rows, found)
    starts: dict[int, int] = {}
    for row in unique:
        starts[row.generation] = min(row.step, starts.get(row.generation, row.step))
    surviving = _surviving(unique, starts)
    if not surviving and last_step is None:
        return Audit(0, 0, 0, 0, 0, 0, 0, 0, ())
    last = max(surviving) if last_step is None else last_step
    first = min(surviving, default=last) if first_step is None else first_step
    for step in sorted(surviving):
        if not first <= step <= last:
            found.fault(f"step {step} has rows, but the run went from step {first} to step {last}")

    newest = last_generation if last_generation is not None else max(starts, default=0)
    latest_row: dict[tuple[int, int], int] = {}
    for row in unique:
        key = row.generation, row.rank
        latest_row[key] = max(row.step, latest_row.get(key, row.step))

    window = _Window(order)
    spans: list[tuple[int, int]] = []
    samples = attested = tokens = 0
    position = first_position
    for step in range(first, last + 1):
        stop = position + global_batch_size
        if end_position is not None:
            stop = min(stop, end_position)
        here = surviving.get(step, [])
        if not here:
            found.fault(f"step {step}: no rows; positions {position} to {stop} were skipped")
        else:
            here = [*here, *_attested(here, position, stop, latest_row, newest)]
            if len({(row.generation, row.dp_size) for row in here}) > 1:
                found.fault(f"step {step}: its rows disagree on the generation or the number of ranks")
            _check_tiling(step, position, stop, here, found)
        for row in here:
            spans.append((row.start, row.stop))
            samples += row.stop - row.start
            tokens += row.tokens
            if row.digest:
                _check_digest(row, window, found)
            else:
                attested += row.stop - row.start
        position = stop

    repeated, skipped = _overlaps_and_gaps(spans, first_position, position)
    return Audit(
        steps=sum(1 for step in surviving if first <= step <= last),
        samples=samples,
        tokens=tokens,
        repeated=repeated,
        skipped=skipped,
        attested=attested,
        redone_steps=len({(row.generation, row.step) for row in unique}) - len(surviving),
        generations=len(starts),
        faults=tuple(found.faults),
    )


class _Window:
    """Reads the order in blocks: one call for thousands of rows instead of one for each."""

    def __init__(self, order: SampleOrder) -> None:
        self._order = order
        self._start = self._stop = 0
        self._ids: Ids = np.empty(0, dtype=np.int64)

    def ids(self, start: int, stop: int) -> Ids:
        if not self._start <= start <= stop <= self._stop:
            self._start, self._stop = start, max(stop, start + _BLOCK)
            self._ids = self._order.ids(self._start, self._stop)
        return self._ids[start - self._start : stop - self._start]


class _Findings:
    """Sentences about what is wrong; after the first hundred only their number."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def fault(self, sentence: str) -> None:
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(sentence)
        elif len(self.faults) == _MOST_FAULTS:
            self.faults.append("and more faults, not listed")


def _without_copies(rows: Iterable[LedgerRow], found: _Findings) -> list[LedgerRow]:
    known: dict[tuple[int, int, int], LedgerRow] = {}
    for row in rows:
        key = row.generation, row.step, row.rank
        before = known.setdefault(key, row)
        if before != row:
            found.fault(
                f"step {row.step}: two different rows of rank {row.rank} in generation {row.generation}: "
                f"positions {before.start} to {before.stop} ({before.digest}) "
                f"and {row.start} to {row.stop} ({row.digest})"
            )
    return list(known.values())


def _surviving(rows: list[LedgerRow], starts: dict[int, int]) -> dict[int, list[LedgerRow]]:
    """Group by step the rows that no later generation has taken back."""
    void_from: dict[int, int | None] = {}
    earliest: int | None = None
    for generation in sorted(starts, reverse=True):
        void_from[generation] = earliest
        earliest = starts[generation] if earliest is None else min(earliest, starts[generation])
    by_step: dict[int, list[LedgerRow]] = defaultdict(list)
    for row in rows:
        limit = void_from[row.generation]
        if limit is None or row.step < limit:
            by_step[row.step].append(row)
    return by_step


def _attested(
    here: list[LedgerRow], position: int, stop: int, latest_row: dict[tuple[int, int], int], newest: int
) -> list[LedgerRow]:
    """Return rows, without a digest, for the ranks that died at this step while their peers finished it."""
    witness = here[0]
    if witness.generation >= newest:
        return []
    present = {row.rank for row in here}
    rows = []
    for rank in range(witness.dp_size):
        gone = latest_row.get((witness.generation, rank), -1) < witness.step
        if rank not in present and gone:
            a, b = cut(stop - position, rank, witness.dp_size)
            rows.append(replace(witness, rank=rank, start=position + a, stop=position + b, digest="", tokens=0))
    return rows


def _check_tiling(step: int, start: int, stop: int, rows: list[LedgerRow], found: _Findings) -> None:
    repeated, skipped = _overlaps_and_gaps([(row.start, row.stop) for row in rows], start, stop)
    outside = sum(max(0, start - row.start) + max(0, row.stop - stop) for row in rows)
    if repeated or skipped or outside:
        parts = ", ".join(f"rank {row.rank}: {row.start} to {row.stop}" for row in rows)
        found.fault(
            f"step {step}: should take positions {start} to {stop} once; {repeated} repeated, {skipped} skipped, "
            f"{outside} of another step ({parts})"
        )


def _check_digest(row: LedgerRow, window: _Window, found: _Findings) -> None:
    expected = digest_of(window.ids(row.start, row.stop))
    if expected != row.digest:
        found.fault(
            f"step {row.step}, rank {row.rank}, generation {row.generation}: the ids delivered at positions "
            f"{row.start} to {row.stop} have digest {row.digest}, the order says {expected}"
        )


def _overlaps_and_gaps(spans: list[tuple[int, int]], start: int, stop: int) -> tuple[int, int]:
    """Return how many positions are taken more than once (each extra time counts), and how many of the range never."""
    ordered = sorted(span for span in spans if span[0] < span[1])
    repeated = skipped = 0
    reached = start
    for a, b in ordered:
        if a > reached:
            skipped += min(a, stop) - min(reached, stop)
        elif a < reached:
            repeated += min(b, reached) - a
        reached = max(reached, b)
    return repeated, skipped + max(0, stop - reached)
