"""The global order: which sample stands at which position, and how a step is cut among the ranks of the day.

A *position* counts samples from the beginning of the run, over all epochs, without bound. A step of global batch
size ``B`` takes the next ``B`` positions whatever the number of ranks is, so a resize neither repeats nor skips a
sample. Every epoch has its own permutation. It is never stored: each position is sent through a keyed bijection
(an alternating Feistel network on the fewest bits that hold the dataset; what falls outside is sent through again,
which is called cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).

The order is part of the format of a snapshot: the same (size, seed, position) must give the same id for ever, on
every machine and version of numpy. Only wrapping 64-bit integer arithmetic is used, and a test freezes the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from elastic.errors import ConfigError

__all__ = ["Ids", "Order", "SampleOrder", "check_dp_size", "cut", "derive_seed"]

Ids: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8
_FEWEST_BITS = 4


class SampleOrder(Protocol):
    """A pure function from global positions to sample ids."""

    def at(self, positions: Ids) -> Ids:
        """Return the ids at ``positions`` (int64, ascending), same shape."""
        ...

    def ids(self, start: int, stop: int) -> Ids:
        """Return the ids at positions ``start`` to ``stop``, the latter excluded."""
        ...


def derive_seed(*parts: int) -> int:
    """Mix integers into one 64-bit seed; any change in any part changes all of it (splitmix64 finaliser, chained)."""
    state = 0
    for part in parts:
        state = (state + (part & _WORD) + _GOLDEN) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state


def cut(global_batch_size: int, dp_rank: int, dp_size: int) -> tuple[int, int]:
    """Return the part ``(start, stop)`` of a step's samples that is ``dp_rank``'s.

    The parts are contiguous, in the order of the ranks, differ by at most one sample, and hold every sample of the
    step exactly once, also if ``dp_size`` does not divide ``global_batch_size``.
    """
    return dp_rank * global_batch_size // dp_size, (dp_rank + 1) * global_batch_size // dp_size


def check_dp_size(global_batch_size: int, dp_size: int) -> None:
    """Refuse a number of ranks that would leave one of them without a sample.

    Raises ConfigError if ``global_batch_size < dp_size``.
    """
    if global_batch_size < dp_size:
        raise ConfigError(
            "global_batch_size",
            global_batch_size,
            f"{dp_size} data-parallel ranks would leave {dp_size - global_batch_size} of them without a sample at "
            f"every step; raise global_batch_size to at least {dp_size}, or allow at most {global_batch_size} ranks",
        )


@dataclass(frozen=True, slots=True)
class Order:
    """The order of ``size`` samples, epoch after epoch: each epoch holds every id exactly once.

    ``shuffle=False`` gives 0, 1, ... size-1 in every epoch. ``numbered_epochs=True`` adds ``epoch * size`` to the
    ids, for a dataset whose items differ from epoch to epoch and that accepts any index. Memory: O(1); time: about
    0.1 µs per id in blocks of thousands.
    """

    size: int
    seed: int
    shuffle: bool = True
    numbered_epochs: bool = False

    def epoch(self, position: int) -> int:
        """Return the epoch, from 0, that ``position`` belongs to."""
        return position // self.size

    def ids(self, start: int, stop: int) -> Ids:
        """Return the ids (int64) at global positions ``start`` to ``stop``, the latter excluded."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def at(self, positions: Ids) -> Ids:
        """Return the ids (int64) at ``positions`` (int64, ascending), same shape."""
        flat = positions.reshape(-1)
        if not flat.size:
            return np.empty(positions.shape, dtype=np.int64)
        epochs, inside = np.divmod(flat, self.size)
        ids = self._permute(inside, epochs) if self.shuffle else inside
        if self.numbered_epochs:
            ids += epochs * self.size
        return ids.reshape(positions.shape)

    def _permute(self, indices: Ids, epochs: Ids) -> Ids:
        bits = max(_FEWEST_BITS, (self.size - 1).bit_length())
        if epochs[0] == epochs[-1]:
            keys = _round_keys(self.seed, epochs[:1])
        else:
            different, which = np.unique(epochs, return_inverse=True)
            keys = _round_keys(self.seed, different)[:, which]
        values = _feistel(indices.astype(np.uint64), bits, keys)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            walked = _feistel(values[outside], bits, keys if keys.shape[1] == 1 else keys[:, outside])
            values[outside] = walked
            outside = outside[walked >= self.size]
        return values.astype(np.int64)


def _round_keys(seed: int, epochs: Ids) -> Words:
    """Return the keys of every round (rows) in every epoch (columns)."""
    bases = _mixed(epochs.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(derive_seed(seed)))
    numbers = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _mixed(bases[None, :] + numbers[:, None])


def _mixed(words: Words) -> Words:
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _feistel(values: Words, bits: int, keys: Words) -> Words:
    """Send values below ``2**bits`` through a bijection of that range: each half is changed by a hash of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number, key in enumerate(keys):
        changed, other, mask = (low, high, low_mask) if number % 2 == 0 else (high, low, high_mask)
        mixed = other * np.uint64(0xBF58476D1CE4E5B9)
        mixed += key
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed >>= np.uint64(29)
        mixed &= mask
        changed ^= mixed
    together: Words = (high << low_bits) | low
    return together
