"""A list of tensors with the dicts that hold them, and a cheap answer to: is it still the same memory?

Walking a model or an optimizer costs microseconds per tensor and would be most of the stall. What a first walk found
is kept, and each snapshot only asks whether every dict still holds the same tensor with the same address, shape and
dtype, and nothing more than before: a third of a microsecond per tensor.
"""

from __future__ import annotations

from collections.abc import Sized
from operator import attrgetter, is_

import torch

_SHAPE, _DTYPE, _INNER = attrgetter("shape"), attrgetter("dtype"), attrgetter("_local_tensor")


class TensorSlots:
    """Tensors by the (dict, key) that holds each. ``sized`` are containers that must keep their number of entries."""

    def __init__(self) -> None:
        self._holders: list[dict[object, object]] = []
        self._keys: list[object] = []
        self._held: list[object] = []
        self._locals: list[torch.Tensor] = []
        self._wrappers: list[object] = []
        self._lists: list[tuple[list[object], list[object]]] = []
        self._sized: list[Sized] = []
        self._sizes: list[int] = []
        self._facts: tuple[list[object], ...] = ()

    def add(self, holder: dict[object, object], key: object, held: object, local: torch.Tensor | None = None) -> None:
        """``held`` is what ``holder[key]`` is now; ``local`` the same if it is a tensor: its memory counts too."""
        self._holders.append(holder)
        self._keys.append(key)
        self._held.append(held)
        if local is not None:
            inner = getattr(local, "_local_tensor", None)
            if inner is not None:
                self._wrappers.append(local)
            self._locals.append(local if inner is None else inner)

    def expect_size(self, container: Sized) -> None:
        self._sized.append(container)
        self._sizes.append(len(container))

    def expect_items(self, items: list[object]) -> None:
        self._lists.append((items, list(items)))

    def close(self) -> None:
        """The list is complete: remember addresses, shapes and dtypes."""
        self._facts = self._now()

    def unchanged(self) -> bool:
        """Whether all dicts still hold the very same tensors in the very same memory."""
        if list(map(len, self._sized)) != self._sizes:
            return False
        if not all(len(now) == len(then) and all(map(is_, now, then)) for now, then in self._lists):
            return False
        held = map(dict.get, self._holders, self._keys)
        return all(map(is_, held, self._held)) and self._now() == self._facts

    def _now(self) -> tuple[list[object], ...]:
        tensors = self._locals
        return (
            list(map(torch.Tensor.data_ptr, tensors)),
            list(map(_SHAPE, tensors)),
            list(map(_DTYPE, tensors)),
            list(map(id, map(_INNER, self._wrappers))),
        )
