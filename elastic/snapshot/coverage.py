"""Whether boxes tile what they should: no gap, no overlap. In columns, for millions of boxes at once. Pure.

Boxes that continue one another along a dimension are joined, dimension by dimension, as long as that makes fewer. Where
one box is left that is the whole, the boxes tiled it, since only boxes that touch and have the same cross-section are
joined; every other case is looked at box by box.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def not_proven(group: npt.NDArray[np.int32] | Ints, offset: Ints, shape: Ints, whole: Ints) -> tuple[Ints, Joined]:
    """Groups whose boxes could not be joined into ``whole``, and what joining left of all boxes.

    ``group`` [n] numbers the wholes, ``offset`` and ``shape`` are [n, d], ``whole`` [groups, d] holds the shapes of
    boxes that begin at 0. A group without boxes is in the answer unless its whole is empty.
    """
    count = np.bincount(group, minlength=len(whole))
    if len(group):
        alone = count[group] == 1
        fits = alone & (shape == whole[group]).all(axis=1) & (offset == 0).all(axis=1)
    else:
        fits = np.zeros(0, bool)
    proven = (whole == 0).any(axis=1) & (count == 0)
    proven[group[fits]] = True
    left = Joined(group[~fits].astype(np.int64), offset[~fits], shape[~fits])
    if len(left.group):
        left = left.joined()
        single = np.bincount(left.group, minlength=len(whole)) == 1
        fits = single[left.group] & (left.offset == 0).all(axis=1) & (left.shape == whole[left.group]).all(axis=1)
        proven[left.group[fits]] = True
    return np.flatnonzero(~proven), left


class Joined:
    """Boxes in columns, by group."""

    __slots__ = ("group", "offset", "shape")

    def __init__(self, group: Ints, offset: Ints, shape: Ints) -> None:
        self.group, self.offset, self.shape = group, offset, shape

    def of(self, groups: Ints) -> list[Ints]:
        """The rows of each of these groups."""
        order = np.argsort(self.group, kind="stable")
        first = np.searchsorted(self.group[order], groups, side="left").tolist()
        last = np.searchsorted(self.group[order], groups, side="right").tolist()
        return [order[start:stop] for start, stop in zip(first, last)]

    def joined(self) -> Joined:
        """After joining along every dimension for as long as it helps."""
        now, before = self, len(self.group) + 1
        while len(now.group) < before:
            before = len(now.group)
            for dim in range(self.offset.shape[1]):
                now = now._along(dim)
        return now

    def _along(self, dim: int) -> Joined:
        others = [d for d in range(self.offset.shape[1]) if d != dim]
        offset, shape = self.offset, self.shape
        across = [column[:, d] for d in others for column in (offset, shape) if (column[:, d] != column[0, d]).any()]
        order = np.lexsort([offset[:, dim], *across, self.group])
        group, offset, shape = self.group[order], offset[order], shape[order]
        same = (group[1:] == group[:-1]) & (offset[1:, dim] == offset[:-1, dim] + shape[:-1, dim])
        for d in others:
            same &= (offset[1:, d] == offset[:-1, d]) & (shape[1:, d] == shape[:-1, d])
        heads = np.flatnonzero(np.concatenate(([True], ~same)))
        longer = shape[heads]
        longer[:, dim] = np.add.reduceat(shape[:, dim], heads)
        return Joined(group[heads], offset[heads], longer)
