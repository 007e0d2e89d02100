"""A list of tensors with the dicts that hold them, and a cheap answer to: is it still the same memory?

Walking a model or an optimizer costs microseconds per tensor and would be most of the stall. What a first walk found
is kept, and each snapshot only asks whether every dict still holds the same tensor with the same address, shape, dtype
and order in memory, and nothing more than before: less than a microsecond per tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from operator import attrgetter, eq, is_
from typing import Any

import torch

_FACTS = (
    torch.Tensor.data_ptr,
    attrgetter("shape"),
    attrgetter("dtype"),
    torch.Tensor.is_contiguous,
)


class TensorSlots:
    """Tensors by the (dict, key) that holds each, and the containers whose number of entries must stay the same."""

    def __init__(self) -> None:
        self._holders: list[dict[Any, Any]] = []
        self._keys: list[object] = []
        self._held: list[object] = []
        self._tensors: list[torch.Tensor] = []
        self._wrappers: list[object] = []
        self._inner: list[object] = []
        self._lists: list[tuple[list[object], list[object]]] = []
        self._sized: list[Sized] = []
        self._sizes: list[int] = []
        self._facts: list[list[object]] = []

    def add(self, holder: dict[Any, Any], key: object, held: object, tensor: torch.Tensor | None = None) -> None:
        """``held`` is what ``holder[key]`` is now; ``tensor`` the same if it is one: its memory counts too."""
        self._holders.append(holder)
        self._keys.append(key)
        self._held.append(held)
        if tensor is not None:
            inner = getattr(tensor, "_local_tensor", None)
            if inner is not None:
                self._wrappers.append(tensor)
                self._inner.append(inner)
            self._tensors.append(tensor if inner is None else inner)

    def expect_size(self, container: Sized) -> None:
        """``container`` must keep its number of entries."""
        self._sized.append(container)
        self._sizes.append(len(container))

    def expect_items(self, items: list[object]) -> None:
        """``items`` must keep the very same entries."""
        self._lists.append((items, list(items)))

    def close(self) -> None:
        """The list is complete: remember addresses, shapes and dtypes."""
        self._facts = [list(map(fact, self._tensors)) for fact in _FACTS]

    def unchanged(self) -> bool:
        """Whether all dicts still hold the very same tensors in the very same memory."""
        return (
            all(map(eq, map(len, self._sized), self._sizes))
            and all(len(now) == len(then) and all(map(is_, now, then)) for now, then in self._lists)
            and all(map(is_, map(dict.get, self._holders, self._keys), self._held))
            and all(map(is_, map(attrgetter("_local_tensor"), self._wrappers), self._inner))
            and all(map(eq, _side_by_side(map(fact, self._tensors) for fact in _FACTS), _side_by_side(self._facts)))
        )


def _side_by_side(columns: Iterable[Iterable[object]]) -> Iterator[tuple[object, ...]]:
    """The rows of ``columns``, one at a time: all that is asked of a tensor is asked while it is in the caches, and no
    list of 20,000 new tuples sets off the cyclic collector in the middle of the stall."""
    return zip(*columns)
