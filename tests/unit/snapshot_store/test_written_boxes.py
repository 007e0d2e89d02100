"""Chunks that continue one another are shown as the box that they make up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.protocol.shares import CHUNK_BYTES
from elastic.snapshot.chunk_table import table_of_pieces
from elastic.snapshot.layout import Box, TensorSpec
from elastic.snapshot.save_plan import Piece
from elastic.snapshot.written_boxes import joined, written_boxes


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=3), st.randoms())
def test_single_elements_of_a_box_are_joined_to_it(sides: list[tuple[int, int]], random: object) -> None:
    box = Box(tuple(at for at, _ in sides), tuple(n for _, n in sides))
    cells = [()]
    for at, n in sides:
        cells = [(*cell, at + i) for cell in cells for i in range(n)]
    random.shuffle(cells)  # type: ignore[attr-defined]
    ones = (1,) * len(sides)
    assert joined((Box(cell, ones), 1) for cell in cells) == [(box, box.volume)]


def test_boxes_with_a_gap_stay_apart() -> None:
    boxes = [(Box((0, 0), (2, 2)), 1), (Box((2, 0), (2, 3)), 1), (Box((5, 0), (1, 3)), 1)]
    assert joined(boxes) == boxes


def test_each_tensor_has_its_boxes_by_pack() -> None:
    big = TensorSpec("big", "uint8", (3 * CHUNK_BYTES,), 1)
    nothing = TensorSpec("nothing", "uint8", (0,), 1)
    table = table_of_pieces([Piece(big, big.box, 0), Piece(nothing, nothing.box, 0)], "s/a/r00000.pack", "xxh3_128")
    found = written_boxes(table)
    assert [(w.box, w.pack, w.chunks) for w in found["big"]] == [(big.box, "s/a/r00000.pack", 3)]
    assert found["nothing"] == []
