"""What a rank receives at one step: the collated data of its share, which samples they are, and what they weigh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from elastic.data.order import Ids

__all__ = ["Batch"]


class Batch:
    """One rank's share of a global batch. Unpacks and indexes like the collated data: ``x, y = batch``, ``batch["x"]``.

    ``ids``       int64 array of the ids of the samples, in the order of the data
    ``positions`` int64 array of their places in the global order
    ``weight``    local samples * dp_size / samples of the global batch

    Why the weight. DDP averages gradients over the ``R`` ranks. Let rank ``r`` hold ``n_r`` of the ``B`` samples and
    have the mean loss ``L_r``. Then ``(1/R) * sum_r(L_r * weight_r) = sum_r(L_r * n_r) / B``: the mean over the global
    batch, on even and uneven shares alike, so the gradients of a step do not depend on how many ranks shared it. Only
    where the shares are even is every weight 1.

    ``token_weight`` is the same by tokens, for a loss that is a mean over tokens in samples of different lengths; it
    is ``weight`` if the dataset does not count tokens. At the very end of finite data a rank may have no sample left:
    then ``ids`` is empty, the data is one stand-in sample, and the weight is 0, so that collectives still pair up.
    """

    __slots__ = ("_ids", "data", "start", "stop", "token_weight", "weight")

    def __init__(
        self, data: Any, ids: Ids, start: int, stop: int, weight: float, token_weight: float | None = None
    ) -> None:
        self.data = data
        self._ids = ids
        self.start, self.stop = start, stop
        self.weight = weight
        self.token_weight = weight if token_weight is None else token_weight

    @property
    def ids(self) -> Ids:
        return self._ids

    @property
    def positions(self) -> Ids:
        return np.arange(self.start, self.stop, dtype=np.int64)

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """Return the same batch with every tensor of the data on ``device`` (tuples, lists and dicts are walked)."""
        data = _moved(self.data, device, non_blocking)
        return Batch(data, self._ids, self.start, self.stop, self.weight, self.token_weight)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def keys(self) -> Any:
        """Return the keys of dict data, so that ``model(**batch)`` works."""
        return self.data.keys()

    def __repr__(self) -> str:
        kind = type(self.data).__name__
        return f"Batch(positions {self.start} to {self.stop}, weight {self.weight:.4g}, data {kind})"


def _moved(data: Any, device: Any, non_blocking: bool) -> Any:
    if hasattr(data, "to"):
        return data.to(device, non_blocking=non_blocking)
    if isinstance(data, Mapping):
        return {key: _moved(value, device, non_blocking) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_moved(value, device, non_blocking) for value in data))
    if isinstance(data, (tuple, list)):
        return type(data)(_moved(value, device, non_blocking) for value in data)
    return data
