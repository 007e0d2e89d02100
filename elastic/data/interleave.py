"""The order of a mixture: which source each position is drawn from, and which of the source's samples it is.

A pure function of (sizes, seed, history of weights): the history is the list of ``(from_position, weights)`` that
applied, so weights may change during a run and the audit can still say what every position had to hold.

Within a period of 65,536 positions, source ``k`` with the integer share ``W_k`` has its ``j``-th sample due at
``(j + 1/2) / W_k``; the positions are handed out by due time. So the count of a source never strays from its share
by more than a few samples at any position, counts at any position have a closed form, and no position depends on a
walk over the ones before it. (Due times: the quota method of just-in-time sequencing, Miltenburg 1989.)

The id of sample ``i`` of source ``k`` out of ``n`` sources is ``i * n + k``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from elastic.data.order import Ids, Order, derive_seed
from elastic.errors import ConfigError

__all__ = ["PERIOD", "Interleave", "WeightChange", "check_weights", "shares"]

PERIOD = 65_536

WeightChange: TypeAlias = "tuple[int, tuple[float, ...]]"


def check_weights(names: Sequence[str], weights: Mapping[str, float]) -> tuple[float, ...]:
    """Return the weights in the order of ``names``.

    Raises ConfigError if one is missing, unknown, negative or not finite, or if all are zero.
    """
    missing = [name for name in names if name not in weights]
    unknown = [name for name in weights if name not in names]
    if missing or unknown:
        raise ConfigError("weights", dict(weights), f"give one weight for each of {', '.join(names)}, and no other")
    values = tuple(float(weights[name]) for name in names)
    if not all(np.isfinite(value) and value >= 0 for value in values) or not any(values):
        raise ConfigError("weights", dict(weights), "weights must be finite and not negative, and one above zero")
    return values


def shares(weights: Sequence[float]) -> Ids:
    """Return the integer shares of a period: they sum to PERIOD, and a weight above zero never gets a share of zero.

    Largest remainders, ties to the first source. Weights are thus exact to about 1/65,536.
    """
    exact = np.asarray(weights, dtype=np.float64) / float(sum(weights)) * PERIOD
    whole: Ids = np.floor(exact).astype(np.int64)
    whole[(whole == 0) & (exact > 0)] = 1
    missing = PERIOD - int(whole.sum())
    if missing > 0:
        whole[np.argsort(np.floor(exact) - exact, kind="stable")[:missing]] += 1
    while missing < 0:
        whole[int(np.argmax(whole))] -= 1
        missing += 1
    return whole


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One period: the source of each of its positions, and how many of that source stand before it."""

    share: Ids
    source: Ids
    rank: Ids
    places: tuple[Ids, ...]

    def counts(self, length: int) -> Ids:
        """Return how many samples of each source the first ``length`` positions of the segment take."""
        periods, rest = divmod(length, PERIOD)
        partial = [int(np.searchsorted(places, rest)) for places in self.places]
        return periods * self.share + np.asarray(partial, dtype=np.int64)


@lru_cache(maxsize=16)
def _pattern(weights: tuple[float, ...]) -> _Pattern:
    share = shares(weights)
    source = np.repeat(np.arange(len(weights), dtype=np.int64), share)
    rank = np.concatenate([np.arange(count, dtype=np.int64) for count in share])
    due = (2 * rank + 1) / share[source]
    by_due = np.lexsort((source, due))
    source, rank = source[by_due], rank[by_due]
    places = tuple(np.flatnonzero(source == number) for number in range(len(weights)))
    return _Pattern(share=share, source=source, rank=rank, places=places)


@dataclass(frozen=True, slots=True)
class Interleave:
    """The order of a mixture of sources with these ``sizes``.

    Each source follows its own Order, epoch after epoch, at its own pace. ``history`` begins at position 0; its
    positions ascend. ``numbered_epochs`` says of each source whether its ids carry the epoch (see Order).
    """

    sizes: tuple[int, ...]
    seed: int
    shuffle: bool
    numbered_epochs: tuple[bool, ...]
    history: tuple[WeightChange, ...]
    _orders: tuple[Order, ...] = field(init=False, repr=False, compare=False)
    _bases: tuple[Ids, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        orders = tuple(
            Order(size, derive_seed(self.seed, number), self.shuffle, numbered)
            for number, (size, numbered) in enumerate(zip(self.sizes, self.numbered_epochs, strict=True))
        )
        bases = [np.zeros(len(self.sizes), dtype=np.int64)]
        for (begin, weights), (end, _) in pairwise(self.history):
            bases.append(bases[-1] + _pattern(weights).counts(end - begin))
        object.__setattr__(self, "_orders", orders)
        object.__setattr__(self, "_bases", tuple(bases))

    def changed(self, position: int, weights: tuple[float, ...]) -> Interleave:
        """Return the order that uses ``weights`` from ``position`` on, and what it was before.

        A change that lies after ``position`` is forgotten; one at the same position is replaced.
        """
        kept = tuple(change for change in self.history if change[0] < position)
        if not kept or kept[-1][1] != weights:
            kept = (*kept, (position, weights))
        return Interleave(self.sizes, self.seed, self.shuffle, self.numbered_epochs, kept)

    def counts(self, position: int) -> Ids:
        """Return how many samples of each source stand before ``position``: the sampler's state, in closed form."""
        segment = self._segment(position)
        begin, weights = self.history[segment]
        return self._bases[segment] + _pattern(weights).counts(position - begin)

    def ids(self, start: int, stop: int) -> Ids:
        """Return the ids (int64) at global positions ``start`` to ``stop``, the latter excluded."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def at(self, positions: Ids) -> Ids:
        """Return the ids (int64) at ``positions`` (int64, ascending), same shape."""
        flat = positions.reshape(-1)
        ids = np.empty(flat.size, dtype=np.int64)
        begins = [begin for begin, _ in self.history]
        edges = [*np.searchsorted(flat, begins).tolist(), flat.size]
        for segment, (a, b) in enumerate(pairwise(edges)):
            if a < b:
                ids[a:b] = self._inside(segment, flat[a:b])
        return ids.reshape(positions.shape)

    def _inside(self, segment: int, positions: Ids) -> Ids:
        begin, weights = self.history[segment]
        pattern = _pattern(weights)
        periods, place = np.divmod(positions - begin, PERIOD)
        source = pattern.source[place]
        drawn = self._bases[segment][source] + pattern.rank[place]
        drawn += periods * pattern.share[source]
        ids = np.empty(positions.size, dtype=np.int64)
        for number, order in enumerate(self._orders):
            here = np.flatnonzero(source == number)
            if here.size:
                ids[here] = order.at(drawn[here]) * len(self._orders) + number
        return ids

    def _segment(self, position: int) -> int:
        begins = [begin for begin, _ in self.history]
        return int(np.searchsorted(begins, position, side="right")) - 1
