"""A comparison of two snapshots against the same comparison in torch, and how little of them it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_snapshots import LAYOUTS, RUN, SnapshotMaker

from elastic.snapshot.box_stream import BoxStream, cut
from elastic.snapshot.difference import Difference, difference, object_changes
from elastic.snapshot.element_values import values_of
from elastic.snapshot.index import ObjectTrees
from elastic.snapshot.layout import Layout, TensorSpec
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.tree import encode
from elastic.storage.memory_blobs import MemoryBlobs

REAL = (
    *("bfloat16", "float16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool"),
)


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[SnapshotMaker]:
    made = SnapshotMaker(tmp_path / "arena")
    yield made
    made.close()


def compare(store: MemoryBlobs, a: SnapshotRef, b: SnapshotRef, names: str = "") -> Difference:
    catalog = SnapshotCatalog(store, RUN)
    return difference(catalog.open(a), catalog.source(a), catalog.open(b), catalog.source(b), names)


@pytest.mark.parametrize("dtype", REAL)
def test_the_value_of_every_bit_pattern_is_the_one_torch_gives(dtype: str) -> None:
    kind: torch.dtype = getattr(torch, dtype)
    if dtype == "bool":
        raw = np.array([0, 1], np.uint8)
    elif kind.itemsize <= 2:
        raw = np.arange(256**kind.itemsize).astype(f"<u{kind.itemsize}").view(np.uint8)
    else:
        raw = np.random.default_rng(3).integers(0, 256, 4096 * kind.itemsize, dtype=np.uint8)
    found = values_of(TensorSpec("t", dtype, (len(raw) // kind.itemsize,), kind.itemsize), raw)
    assert found is not None
    expected = torch.from_numpy(raw.copy()).view(kind).to(torch.float64).numpy()
    np.testing.assert_array_equal(found, expected)


def test_complex_values_are_complex_and_an_unknown_dtype_has_none() -> None:
    raw = np.array([1 + 2j, -3j], np.complex64).view(np.uint8)
    found = values_of(TensorSpec("t", "complex64", (2,), 8), raw)
    np.testing.assert_array_equal(np.asarray(found), np.array([1 + 2j, -3j]))
    assert values_of(TensorSpec("t", "float4_e2m1fn_x2", (16,), 1), raw) is None


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 5), max_size=4), st.sampled_from([1, 2, 8]), st.integers(8, 64))
def test_what_a_tensor_is_cut_into_is_the_tensor_in_order(shape: list[int], itemsize: int, most: int) -> None:
    spec = TensorSpec("t", "x", tuple(shape), itemsize)
    boxes = list(cut(spec, most))
    numbers = np.arange(spec.nbytes // itemsize).reshape(shape)
    joined = np.concatenate([numbers[box.within(spec.box)].reshape(-1) for box in boxes])
    assert joined.tolist() == list(range(spec.nbytes // itemsize))
    assert all(box.volume * itemsize <= most or box.volume == 1 for box in boxes)


@pytest.mark.parametrize("window", [7, 64, 1000, 1 << 20])
def test_boxes_are_read_whole_however_small_the_window(maker: SnapshotMaker, window: int) -> None:
    store, values = MemoryBlobs(), maker.values(5)
    ref = maker.commit(store, 5)
    catalog = SnapshotCatalog(store, RUN)
    table = catalog.open(ref).table
    wanted = [(spec.name, box) for spec in table.specs for box in cut(spec, max(window, spec.itemsize))]
    stream = BoxStream(table, catalog.source(ref), window)
    for (name, box), raw in zip(wanted, stream.read(wanted), strict=True):
        spec = next(spec for spec in table.specs if spec.name == name)
        assert raw.tobytes() == np.ascontiguousarray(values[name][box.within(spec.box)]).tobytes()


def test_only_what_changed_is_read_and_told(maker: SnapshotMaker) -> None:
    store, values = MemoryBlobs(), maker.values(5)
    values["linear.weight"] = np.full((12, 10, 1), 1.5, "<f4").view(np.uint8).reshape(12, 10, 4)
    first = maker.commit(store, 5, values)
    after = values["linear.weight"].copy()
    after.view("<f4")[3, 7] = 4.0
    second = maker.commit(store, 6, values | {"linear.weight": after}, previous=first)
    found = compare(store, first, second)
    (change,) = found.changed
    assert (change.name, change.changed, change.elements, change.max_abs) == ("linear.weight", 1, 120, 2.5)
    read = SnapshotCatalog(store, RUN).open(second).table
    chunk = next(r for r in range(len(read)) if read.packs[read.pack_id[r]].startswith(second.directory))
    assert change.relative_norm == pytest.approx(2.5 / (1.5 * read.box(chunk).volume ** 0.5))
    assert (found.unchanged, found.chunks_read) == (4, 1)
    assert found.bytes_read == 2 * int(read.nbytes[chunk])
    assert not found.same
    assert compare(store, first, second, "embedding").same
    assert compare(store, first, first).same


def test_another_cut_of_the_same_values_is_no_change(maker: SnapshotMaker, tmp_path: Path) -> None:
    store = MemoryBlobs()
    first = maker.commit(store, 5)
    other = SnapshotMaker(tmp_path / "other", mesh={"dp": 3, "tp": 5})
    other.number = 40
    second = other.commit(store, 6, maker.values(5))
    found = compare(store, first, second)
    assert found.same
    assert found.chunks_read
    other.close()


def test_values_that_are_not_finite_are_counted_apart(maker: SnapshotMaker) -> None:
    store, values = MemoryBlobs(), maker.values(5)
    values["linear.bias"] = np.zeros(7, "<f8").view(np.uint8).reshape(7, 8)
    first = maker.commit(store, 5, values)
    after = values["linear.bias"].copy()
    after.view("<f8")[:3, 0] = [np.nan, np.inf, 2.0]
    second = maker.commit(store, 6, values | {"linear.bias": after})
    (change,) = compare(store, first, second).changed
    assert (change.changed, change.not_finite, change.max_abs) == (3, 2, 2.0)
    assert change.relative_norm == float("inf")


def test_added_removed_and_retyped_tensors_and_ties_are_told(maker: SnapshotMaker, tmp_path: Path) -> None:
    store = MemoryBlobs()
    first = maker.commit(store, 5)
    layouts = (
        *(layout for layout in LAYOUTS if layout.spec.name not in ("mask", "linear.bias")),
        Layout(TensorSpec("linear.bias", "float32", (7,), 4)),
        Layout(TensorSpec("extra", "int8", (2,), 1)),
    )
    other = SnapshotMaker(tmp_path / "other", layouts=layouts)
    second = other.commit(store, 6, other.values(5))
    found = compare(store, first, second)
    assert (found.added, found.removed) == (("extra",), ("mask",))
    assert found.retyped == (("linear.bias", "float64[7]", "float32[7]"),)
    assert found.retied == ()
    other.close()


def trees(*values: Any) -> ObjectTrees:
    texts = [encode(value) for value in values]
    return ObjectTrees(tuple(map(str, range(len(texts)))), {str(i): text for i, text in enumerate(texts)})


def test_objects_that_changed_are_named_by_path_and_rank() -> None:
    before = {"optimizer": {"groups": [{"lr": 0.1}], "betas": (0.9, 0.99)}, "ids": {1: "a"}, "gone": None}
    after = {"optimizer": {"groups": [{"lr": 0.05}], "betas": (0.9, 0.95)}, "ids": {1: "b"}, "new": [1]}
    left, right = trees(before, before), trees(after, {**before, "ids": {1: "b"}})
    right = ObjectTrees(("x0", "x1"), {"x0": right.trees["0"], "x1": right.trees["1"]})
    found = {change.path: (change.before, change.after, change.ranks) for change in object_changes(left, right)}
    assert found == {
        "optimizer.groups[0].lr": ("0.1", "0.05", (0,)),
        "optimizer.betas[1]": ("0.99", "0.95", (0,)),
        "ids[1]": ('"a"', '"b"', (0, 1)),
        "gone": ("null", None, (0,)),
        "new": (None, "[1]", (0,)),
    }
