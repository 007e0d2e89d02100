"""Boxes tile their whole or are found not to: the columns say what a look at every element says."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.snapshot.coverage import not_proven

Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A whole and boxes that tile it, cut again and again along any dimension."""
    whole = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=2)))
    boxes = [((0, 0), whole)]
    for _ in range(draw(st.integers(0, 6))):
        offset, shape = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, 1))
        rows = draw(st.integers(0, shape[dim]))
        if 0 < rows < shape[dim]:
            first, second, at = list(shape), list(shape), list(offset)
            first[dim], second[dim], at[dim] = rows, shape[dim] - rows, offset[dim] + rows
            boxes += [(offset, tuple(first)), (tuple(at), tuple(second))]
        else:
            boxes.append((offset, shape))
    return whole, draw(st.permutations(boxes))


def tiles(whole: tuple[int, ...], boxes: list[Box]) -> bool:
    seen = np.zeros(whole, int)
    for (a, b), (n, m) in boxes:
        seen[a : a + n, b : b + m] += 1
    return bool((seen == 1).all())


def columns(many: list[tuple[tuple[int, ...], list[Box]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    group = [number for number, (_, boxes) in enumerate(many) for _ in boxes]
    boxes = [box for _, boxes in many for box in boxes]
    offset = np.array([box[0] for box in boxes], np.int64).reshape(-1, 2)
    shape = np.array([box[1] for box in boxes], np.int64).reshape(-1, 2)
    return np.array(group, np.int64), offset, shape, np.array([whole for whole, _ in many], np.int64).reshape(-1, 2)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data(), st.lists(tilings(), min_size=1, max_size=4))
def test_what_is_called_proven_tiles_and_what_tiles_a_grid_is_proven(
    data: st.DataObject, many: list[tuple[tuple[int, ...], list[Box]]]
) -> None:
    for _, boxes in many:
        if boxes and data.draw(st.booleans()):
            del boxes[data.draw(st.integers(0, len(boxes) - 1))]
        elif boxes and data.draw(st.booleans()):
            boxes.append(data.draw(st.sampled_from(boxes)))
    doubtful, _ = not_proven(*columns(many))
    for number, (whole, boxes) in enumerate(many):
        if number not in doubtful:
            assert tiles(whole, boxes)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_a_grid_is_always_proven(rows: list[int], across: list[int]) -> None:
    starts, sides = np.cumsum([0, *rows]).tolist(), np.cumsum([0, *across]).tolist()
    boxes = [((a, b), (n, m)) for a, n in zip(starts, rows) for b, m in zip(sides, across)]
    doubtful, left = not_proven(*columns([((sum(rows), sum(across)), boxes)]))
    assert not len(doubtful)
    assert len(left.group) <= 1


def test_a_hole_beside_an_overlap_is_not_taken_for_whole() -> None:
    """As many elements as the whole has, one of them twice."""
    boxes: list[Box] = [((0, 0), (1, 4)), ((0, 0), (1, 4)), ((2, 0), (2, 4))]
    assert not_proven(*columns([((4, 4), boxes)]))[0].tolist() == [0]


def test_nothing_is_enough_for_an_empty_whole_only() -> None:
    assert not_proven(*columns([((0, 4), []), ((1, 1), [])]))[0].tolist() == [1]
