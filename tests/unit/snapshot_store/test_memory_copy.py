"""Pieces of memory arrive whole, whoever copies them and however they are cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.snapshot import memory_copy
from elastic.snapshot.memory_copy import Pieces, addresses_of, copy, parts_for


def _pieces(sizes: list[int]) -> tuple[Pieces, np.ndarray, np.ndarray]:
    """Pieces one after another, each source 3 bytes further off alignment than the last; source and destination."""
    n = np.array(sizes, np.int64)
    starts = np.cumsum(n + 3) - n
    source = np.random.default_rng(0).integers(0, 256, int((n + 3).sum()) + 1, np.uint8)
    offsets = np.cumsum(-(-n // 64) * 64) - -(-n // 64) * 64
    return (
        Pieces(offsets, starts + source.ctypes.data, n),
        source,
        np.zeros(int((-(-n // 64) * 64).sum()) + 64, np.uint8),
    )


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 40_000), max_size=12), st.integers(1, 5))
def test_cut_pieces_are_the_same_memory_in_balanced_parts(sizes: list[int], parts: int) -> None:
    pieces, _, _ = _pieces(sizes)
    cut = pieces.split(parts)
    placed = sorted((o, a, n) for part in cut for o, a, n in zip(part.offsets, part.addresses, part.sizes))
    joined: list[tuple[int, int, int]] = []
    for offset, address, size in placed:
        if joined and joined[-1][0] + joined[-1][2] == offset and joined[-1][1] + joined[-1][2] == address:
            joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + size)
        else:
            joined.append((offset, address, size))
    whole = zip(pieces.offsets.tolist(), pieces.addresses.tolist(), pieces.sizes.tolist())
    assert joined == [piece for piece in whole if piece[2]]
    assert len(cut) <= parts
    assert all(part.nbytes <= pieces.nbytes / parts + memory_copy.BORDER_BYTES for part in cut)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("sizes", [[], [1], [63, 64, 65, 127], [4096, 16384, 16447, 70_001], [9 << 20, 5, 3 << 20]])
def test_every_byte_arrives_and_none_beside_it(
    sizes: list[int], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(memory_copy, "_stream_copy", None)
    elif memory_copy._stream_copy is None:
        pytest.skip("the package was installed without a compiler, or not at all")
    pieces, source, destination = _pieces(sizes)
    with ThreadPoolExecutor(2) as threads:
        copy(parts_for(pieces, 3), destination.ctypes.data, threads)
    expected = np.zeros_like(destination)
    for offset, address, size in zip(pieces.offsets.tolist(), pieces.addresses.tolist(), pieces.sizes.tolist()):
        start = address - source.ctypes.data
        expected[offset : offset + size] = source[start : start + size]
    np.testing.assert_array_equal(destination, expected)


@pytest.mark.parametrize("compiled", [True, False])
def test_buffers_of_any_kind_are_found_where_they_lie(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(memory_copy, "_stream_copy", None)
    elif memory_copy._stream_copy is None:
        pytest.skip("the package was installed without a compiler, or not at all")
    data = np.zeros(100, np.uint8)
    read_only = data.data.toreadonly()
    found = addresses_of([data, data[3:50], data.data[7:], read_only[9:10]])
    assert (found - data.ctypes.data).tolist() == [0, 3, 7, 9]
    assert addresses_of([]).tolist() == []


def test_the_compiled_search_refuses_what_is_no_buffer() -> None:
    compiled = pytest.importorskip("elastic.snapshot._stream_copy")
    with pytest.raises(TypeError):
        compiled.addresses([np.zeros(1), 5], np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="for each buffer"):
        compiled.addresses([], np.zeros(1, np.int64))


def test_the_compiled_copy_refuses_lists_of_different_lengths() -> None:
    compiled = pytest.importorskip("elastic.snapshot._stream_copy")
    with pytest.raises(ValueError, match="as many 64-bit integers"):
        compiled.copy(np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(1, np.int64))
