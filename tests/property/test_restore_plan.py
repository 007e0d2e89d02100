"""Boxes that some ranks wrote, read as the boxes of others: each element arrives once, nothing else is read."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import CorruptSnapshot
from elastic.mesh import Mesh
from elastic.protocol.shares import CHUNK_BYTES
from elastic.snapshot.chunk_table import ChunkTable, table_of_pieces
from elastic.snapshot.layout import Box, Layout, TensorSpec
from elastic.snapshot.restore_plan import plan_restore
from elastic.snapshot.save_plan import plan_share

meshes = st.tuples(st.integers(1, 4), st.integers(1, 3)).map(lambda sizes: Mesh((("dp", sizes[0]), ("tp", sizes[1]))))


@st.composite
def layouts(draw: st.DrawFn, name: str) -> tuple[Layout, Layout]:
    """One tensor as two meshes lay it out."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 6, 7, 11]), max_size=3)))
    spec = TensorSpec(name, "int64", shape, 8)
    axes = st.lists(st.sampled_from(["dp", "tp"]), unique=True) if shape else st.just([])
    dims = st.integers(0, max(len(shape) - 1, 0))
    return tuple(Layout(spec, tuple((axis, draw(dims)) for axis in draw(axes))) for _ in range(2))


def write(held: list[Layout], mesh: Mesh, values: dict[str, np.ndarray]) -> tuple[ChunkTable, dict[str, bytes]]:
    """What all ranks of ``mesh`` write: the chunk table and the packs."""
    tables, packs = [], {}
    for rank in range(mesh.world_size):
        share = plan_share(held, mesh, rank)
        pack = np.zeros(share.nbytes, np.uint8)
        for piece in share.pieces:
            part = np.ascontiguousarray(values[piece.tensor.name][piece.box.within(piece.tensor.box)])
            pack[piece.offset : piece.offset + piece.nbytes] = part.reshape(-1).view(np.uint8)
        packs[f"r{rank}.pack"] = pack.tobytes()
        tables.append(table_of_pieces(share.pieces, f"r{rank}.pack", "xxh3_128"))
    return ChunkTable.concat(tables), packs


def arrived(
    table: ChunkTable, packs: dict[str, bytes], wanted: list[tuple[str, Box]], window_bytes: int
) -> list[np.ndarray]:
    """The wanted boxes, of int64, filled as the plan says; each element once."""
    plan = plan_restore(table, wanted, window_bytes)
    got = [np.full(box.shape, -1) for _, box in wanted]
    for window, copies in zip(plan.windows, plan.copies):
        for copy in range(copies.start, copies.stop):
            assert window.start <= plan.source[copy] < window.stop
            row = plan.rows[plan.source[copy]]
            start = int(table.byte_start[row])
            raw = packs[table.packs[table.pack_id[row]]][start : start + int(table.nbytes[row])]
            shape = table.box(int(row)).shape
            target = got[plan.target[copy]]
            dims = len(shape)
            region = [
                tuple(slice(a, a + n) for a, n in zip(offset[copy, :dims].tolist(), plan.extent[copy, :dims].tolist()))
                for offset in (plan.source_offset, plan.target_offset)
            ]
            chunk = np.frombuffer(raw, np.int64).reshape(shape)
            assert (target[region[1]] == -1).all(), "arrives once"
            target[region[1]] = chunk[region[0]]
            if plan.flat[copy]:
                begin, to, size = plan.source_byte[copy] // 8, plan.target_byte[copy] // 8, plan.nbytes[copy] // 8
                flat = np.frombuffer(raw, np.int64)[begin : begin + size]
                assert np.array_equal(target.reshape(-1)[to : to + size], flat)
    return got


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data(), meshes, meshes, st.integers(1, 300))
def test_every_wanted_element_arrives_whatever_the_two_meshes(
    data: st.DataObject, before: Mesh, after: Mesh, window_bytes: int
) -> None:
    pairs = [data.draw(layouts(f"t{n}")) for n in range(data.draw(st.integers(1, 4)))]
    values = {a.spec.name: np.arange(math.prod(a.spec.shape)).reshape(a.spec.shape) for a, _ in pairs}
    table, packs = write([a for a, _ in pairs], before, values)
    for rank in range(after.world_size):
        wanted = [(b.spec.name, box) for _, b in pairs if (box := b.box_of(after, rank)) is not None]
        got = arrived(table, packs, wanted, window_bytes)
        for (name, box), array in zip(wanted, got):
            whole = Box((0,) * len(box.shape), values[name].shape)
            assert np.array_equal(array, values[name][box.within(whole)])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data(), meshes, st.integers(1, 400))
def test_windows_hold_at_most_the_budget_or_one_chunk(data: st.DataObject, mesh: Mesh, window_bytes: int) -> None:
    held = [data.draw(layouts(f"t{n}"))[0] for n in range(3)]
    table, _ = write(held, mesh, {a.spec.name: np.zeros(a.spec.shape, np.int64) for a in held})
    plan = plan_restore(table, [(a.spec.name, a.spec.box) for a in held], window_bytes)
    for window in plan.windows:
        sizes = table.nbytes[plan.rows[window]]
        assert sizes.sum() <= window_bytes or len(sizes) == 1
    assert [row for window in plan.windows for row in plan.rows[window]] == plan.rows.tolist()
    assert len(set(plan.rows.tolist())) == len(plan.rows)


@pytest.mark.parametrize(("before", "after"), [(16, 24), (24, 16), (16, 32), (64, 512), (512, 64), (512, 500)])
def test_any_number_of_ranks_goes_on_as_any_other(before: int, after: int) -> None:
    """16 → 24 as well as 16 → 32, and 512 as well as 64: a matrix of uneven rows, one cut across, and a vector that
    has fewer elements than there are ranks."""
    cut = ((("dp", 0),), (("dp", 1),), (("dp", 0),))
    shapes = ((1000, 3), (2, 700), (11,))
    held = [Layout(TensorSpec(f"t{n}", "int64", shape, 8), cut[n]) for n, shape in enumerate(shapes)]
    values = {a.spec.name: np.arange(math.prod(a.spec.shape)).reshape(a.spec.shape) for a in held}
    table, packs = write(held, Mesh((("dp", before),)), values)
    mesh, seen = Mesh((("dp", after),)), 0
    for rank in range(after):
        wanted = [(layout.spec.name, box) for layout in held if (box := layout.box_of(mesh, rank)) is not None]
        for (name, box), array in zip(wanted, arrived(table, packs, wanted, 1 << 20)):
            assert np.array_equal(array, values[name][box.within(Box((0,) * len(box.shape), values[name].shape))])
            seen += array.size
    assert seen == sum(value.size for value in values.values())


def test_no_rank_of_another_world_reads_more_than_its_part_and_a_chunk_at_each_edge() -> None:
    """No rank gathers the whole: neither what it reads nor what it holds at a time grows with the model."""
    spec = TensorSpec("t", "float32", (1 << 20, 1 << 10), 4)
    layout, window_bytes = Layout(spec, (("dp", 0),)), 64 << 20
    before, after = Mesh((("dp", 48),)), Mesh((("dp", 36),))
    shares = [plan_share([layout], before, rank) for rank in range(48)]
    table = ChunkTable.concat([table_of_pieces(share.pieces, f"r{n}", "xxh3_128") for n, share in enumerate(shares)])
    for rank in range(36):
        box = layout.box_of(after, rank)
        assert box is not None
        plan = plan_restore(table, [("t", box)], window_bytes)
        assert plan.copied_bytes == box.volume * 4
        assert plan.read_bytes <= plan.copied_bytes + 2 * CHUNK_BYTES < spec.nbytes // 30
        assert max(int(table.nbytes[plan.rows[window]].sum()) for window in plan.windows) <= window_bytes


def big_table() -> tuple[ChunkTable, TensorSpec]:
    spec = TensorSpec("t", "float32", (1 << 16, 1 << 10), 4)
    layout, mesh = Layout(spec), Mesh((("dp", 1),))
    return table_of_pieces(plan_share([layout], mesh, 0).pieces, "p", "xxh3_128"), spec


def test_a_kibibyte_out_of_a_large_tensor_reads_one_chunk() -> None:
    table, _ = big_table()
    plan = plan_restore(table, [("t", Box((5000, 0), (1, 256)))])
    assert (len(plan.rows), plan.read_bytes, plan.copied_bytes) == (1, 4 << 20, 1024)


def test_a_tensor_wanted_twice_is_read_once() -> None:
    table, spec = big_table()
    plan = plan_restore(table, [("t", spec.box), ("t", Box((0, 0), (1 << 15, 1 << 10)))])
    assert plan.read_bytes == spec.nbytes
    assert plan.copied_bytes == spec.nbytes * 3 // 2


def test_a_missing_chunk_names_the_tensor() -> None:
    table, spec = big_table()
    with pytest.raises(CorruptSnapshot, match=r"'t': 66060288 elements .* has 67108864"):
        plan_restore(table.take(np.arange(1, len(table))), [("t", spec.box)])


def test_a_tensor_that_is_not_there_is_named() -> None:
    with pytest.raises(CorruptSnapshot, match="'u' is not in"):
        plan_restore(big_table()[0], [("u", Box((), ()))])


def test_half_a_million_chunks_are_planned_in_a_fraction_of_a_second() -> None:
    table, _ = big_table()
    many = 2000
    specs = tuple(TensorSpec(f"t{n}", "float32", (1 << 16, 1 << 10), 4) for n in range(many))
    rows = len(table)
    wide = ChunkTable(
        specs,
        ("p",),
        np.repeat(np.arange(many, dtype=np.int32), rows),
        np.tile(table.offset, (many, 1)),
        np.tile(table.shape, (many, 1)),
        np.zeros(many * rows, np.int32),
        np.tile(table.byte_start, many),
        np.tile(table.nbytes, many),
        np.zeros((many * rows, 16), np.uint8),
        "xxh3_128",
    )
    started = time.process_time()
    plan = plan_restore(wide, [("t7", specs[7].box)])
    assert time.process_time() - started < 0.5
    assert len(plan.rows) == rows


def test_a_gap_hidden_by_an_overlap_is_found_before_anything_is_read() -> None:
    table, spec = big_table()
    rows = np.concatenate([np.arange(1, len(table)), [1]])
    with pytest.raises(CorruptSnapshot, match=r"'t': boxes .* overlap"):
        plan_restore(table.take(rows), [("t", spec.box)])
