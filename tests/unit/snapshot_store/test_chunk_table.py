from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import CorruptSnapshot
from elastic.protocol.shares import CHUNK_BYTES
from elastic.snapshot.chunk_table import ChunkTable, chunks_of, table_of_pieces
from elastic.snapshot.index import check_coverage
from elastic.snapshot.layout import Box, TensorSpec
from elastic.snapshot.save_plan import Piece


def piece(shape: tuple[int, ...], itemsize: int = 4, offset: int = 0, name: str = "t") -> Piece:
    spec = TensorSpec(name, f"bytes{itemsize}", shape, itemsize)
    return Piece(spec, spec.box, offset)


def table(*pieces: Piece, pack: str = "a/r00000.pack") -> ChunkTable:
    return table_of_pieces(pieces, pack, "xxh3_128")


@given(st.lists(st.integers(1, 4000), min_size=0, max_size=4), st.sampled_from([1, 2, 4, 8, 16]))
@settings(derandomize=True, deadline=None)
def test_chunks_of_a_piece_follow_each_other_and_none_is_too_large(shape: list[int], itemsize: int) -> None:
    while math.prod(shape) * itemsize > 200 * CHUNK_BYTES:
        shape[shape.index(max(shape))] //= 2
    whole = piece(tuple(shape), itemsize, offset=640)
    offset, size, start, nbytes = chunks_of(whole)
    assert start[0] == 640
    assert (start[1:] == (start + nbytes)[:-1]).all()
    assert start[-1] + nbytes[-1] == 640 + whole.nbytes
    assert nbytes.max() <= CHUNK_BYTES
    assert (size.prod(axis=1) * itemsize == nbytes).all()
    # Row-major: the first element of a chunk lies where the bytes say.
    flat = np.zeros(len(offset), np.int64)
    for dim in range(len(shape)):
        flat = flat * shape[dim] + offset[:, dim]
    assert (flat * itemsize == start - 640).all()
    check_coverage(table(whole))


def test_a_row_larger_than_a_chunk_is_cut_along_the_next_dimension() -> None:
    offset, shape, _, nbytes = chunks_of(piece((2, 3, CHUNK_BYTES // 4)))
    assert offset.tolist() == [[i, j, 0] for i in range(2) for j in range(3)]
    assert shape.tolist() == [[1, 1, CHUNK_BYTES // 4]] * 6
    assert set(nbytes.tolist()) == {CHUNK_BYTES}


def test_a_scalar_is_one_chunk_and_an_empty_tensor_none_but_both_are_listed() -> None:
    made = table(piece((), name="scalar"), piece((0, 3), name="empty"))
    assert len(made) == 1
    assert made.box(0) == Box((), ())
    assert [spec.name for spec in made.specs] == ["scalar", "empty"]
    check_coverage(made)


def sample() -> ChunkTable:
    made = table(piece((5, 3), name="a"), piece((), 8, 64, "b"), piece((2, 2, 2), 1, 128, "c"))
    digest = np.random.default_rng(0).integers(0, 256, made.digest.shape, dtype=np.uint8)
    return replace(made, digest=digest, aliases=(("d", "a"),))


def assert_same(one: ChunkTable, other: ChunkTable) -> None:
    for field in ("specs", "packs", "algorithm", "aliases"):
        assert getattr(one, field) == getattr(other, field)
    for field in ("tensor_id", "offset", "shape", "pack_id", "byte_start", "nbytes", "digest"):
        a, b = getattr(one, field), getattr(other, field)
        assert a.dtype == b.dtype
        assert np.array_equal(a, b), field


def test_a_table_comes_back_from_its_file() -> None:
    assert_same(ChunkTable.from_parquet_bytes(sample().to_parquet_bytes()), sample())
    empty = ChunkTable.empty("sha256")
    assert_same(ChunkTable.from_parquet_bytes(empty.to_parquet_bytes()), empty)


def test_tables_of_ranks_merge_by_name() -> None:
    spec = TensorSpec("t", "float32", (4, 2), 4)
    halves = [
        table_of_pieces([Piece(spec, Box((row, 0), (2, 2)), 0)], f"a/r0000{rank}.pack", "xxh3_128")
        for rank, row in enumerate((0, 2))
    ]
    merged = ChunkTable.concat(halves)
    assert merged.specs == (spec,)
    assert merged.packs == ("a/r00000.pack", "a/r00001.pack")
    assert merged.pack_id.tolist() == [0, 1]
    check_coverage(merged)
    with pytest.raises(CorruptSnapshot, match=r"'t'.*in no box"):
        check_coverage(halves[0])
    with pytest.raises(CorruptSnapshot, match="overlap"):
        check_coverage(ChunkTable.concat([halves[0], halves[0], halves[1]]))


def test_tables_that_disagree_about_a_tensor_do_not_merge() -> None:
    with pytest.raises(CorruptSnapshot, match=r"'t' is bytes4.*bytes8"):
        ChunkTable.concat([table(piece((3,), 4)), table(piece((3,), 8))])


def test_a_tensor_without_chunks_and_an_alias_of_nothing_are_gaps() -> None:
    whole = table(piece((3,), name="a"), piece((3,), offset=64, name="b"))
    with pytest.raises(CorruptSnapshot, match="'b'"):
        check_coverage(whole.take(np.array([0])))
    with pytest.raises(CorruptSnapshot, match="alias 'x'"):
        check_coverage(replace(whole, aliases=(("x", "gone"),)))


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_random_grid_tiles_and_with_one_box_less_or_moved_it_does_not(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    spec = TensorSpec("t", "uint8", shape, 1)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = [Box((), ())]
    for cut in cuts:
        boxes = [Box((*box.offset, a), (*box.shape, b - a)) for box in boxes for a, b in zip(cut, cut[1:]) if b > a]
    boxes = data.draw(st.permutations(boxes))
    pieces = [Piece(spec, box, 64 * i) for i, box in enumerate(boxes)]
    check_coverage(table(*pieces))
    with pytest.raises(CorruptSnapshot):
        check_coverage(
            table_of_pieces([*pieces[:-1], Piece(spec, Box((0,) * len(shape), (0,) * len(shape)), 0)], "p", "sha256")
        )
    with pytest.raises(CorruptSnapshot):
        check_coverage(table(*pieces, pieces[0]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_id", [0, 7, 2]),
        ("pack_id", [0, 0, 1]),
        ("pack_id", [0, -1, 0]),
        ("byte_start", [-1, 64, 128]),
        ("nbytes", [61, 8, 8]),
        ("offset", [[1, 0, 0], [0, 0, 0], [0, 0, 0]]),
        ("shape", [[5, 3, 1], [1, 1, 1], [2, 2, 0]]),
    ],
)
def test_a_file_with_an_impossible_row_is_refused(field: str, value: list[int]) -> None:
    good = sample()
    bad = replace(good, **{field: np.array(value, getattr(good, field).dtype)})
    with pytest.raises(CorruptSnapshot):
        ChunkTable.from_parquet_bytes(bad.to_parquet_bytes())


@pytest.mark.parametrize("pack", ["../r.pack", "/etc/passwd", "a/../../b", "a//b", "a\\b", "", "a/.hidden"])
def test_a_file_that_names_a_pack_outside_of_the_run_is_refused(pack: str) -> None:
    with pytest.raises(CorruptSnapshot, match="outside"):
        ChunkTable.from_parquet_bytes(replace(sample(), packs=(pack,)).to_parquet_bytes())


def test_bytes_that_are_no_table_are_refused() -> None:
    body = sample().to_parquet_bytes()
    for bad in (b"", b"PAR1", body[:-9], body[9:]):
        with pytest.raises(CorruptSnapshot):
            ChunkTable.from_parquet_bytes(bad)


def test_an_unknown_checksum_is_refused_by_name() -> None:
    body = sample().to_parquet_bytes().replace(b'"xxh3_128"', b'"crc_none"')
    with pytest.raises(CorruptSnapshot, match="crc_none"):
        ChunkTable.from_parquet_bytes(body)
