from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.snapshot.chunk_table import ChunkTable, table_of_pieces
from elastic.snapshot.delta import delta
from elastic.snapshot.layout import Box, TensorSpec
from elastic.snapshot.save_plan import Piece

SPEC = TensorSpec("t", "uint8", (64,), 1)


def share(contents: list[int], sizes: list[int]) -> ChunkTable:
    """Chunks with these contents (a number stands for a digest) and sizes, 64-aligned, each a tensor of its own."""
    pieces, at = [], 0
    for i, size in enumerate(sizes):
        spec = TensorSpec(f"t{i}", "uint8", (size,), 1)
        pieces.append(Piece(spec, Box((0,), (size,)), at))
        at += -(-size // 64) * 64
    made = table_of_pieces(pieces, "node/r00000.pack", "xxh3_128")
    digest = np.zeros((len(sizes), 16), np.uint8)
    digest[:, 0] = contents
    return replace(made, digest=digest)


@given(st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=30))
@settings(derandomize=True, deadline=None)
def test_what_a_delta_writes_and_refers_to_is_every_chunk_once(chunks: list[tuple[int, bool]]) -> None:
    sizes = [size for size, _ in chunks]
    before = replace(share(list(range(len(sizes))), sizes), packs=("old/a/r00000.pack",))
    after = share([i + 100 * changed for i, (_, changed) in enumerate(chunks)], sizes)
    found = delta(after, before, "new/a/r00000.pack")
    data = np.random.default_rng(0).integers(0, 256, 64 * 300, dtype=np.uint8)
    pack = bytearray()
    for start, end in found.runs.tolist():
        pack.extend(b"\0" * (-len(pack) % 64))
        pack.extend(data[start:end])
    assert len(pack) == found.pack_bytes
    for row, (size, changed) in enumerate(chunks):
        name, start = found.table.packs[found.table.pack_id[row]], int(found.table.byte_start[row])
        if changed:
            assert name == "new/a/r00000.pack"
            assert start % 64 == 0
            old = int(after.byte_start[row])
            assert bytes(pack[start : start + size]) == data[old : old + size].tobytes()
        else:
            assert (name, start) == ("old/a/r00000.pack", int(before.byte_start[row]))
    assert found.written_bytes == sum(size for size, changed in chunks if changed)
    assert found.referenced_bytes == sum(size for size, changed in chunks if not changed)


def test_a_chunk_that_moved_is_found_by_its_checksum() -> None:
    before = replace(share([1, 2, 3], [10, 20, 30]), packs=("old/a/r00000.pack",))
    after = share([3, 9, 1], [30, 20, 10])
    found = delta(after, before, "new/a/r00000.pack")
    assert found.written_bytes == 20
    assert found.referenced == ("old/a/r00000.pack",)


def test_equal_checksums_of_unequal_length_are_different_chunks() -> None:
    found = delta(share([1], [10]), share([1], [11]), "new/a/r00000.pack")
    assert found.written_bytes == 10


def test_another_checksum_algorithm_means_a_full_snapshot() -> None:
    before = replace(share([1], [10]), algorithm="sha256", digest=np.zeros((1, 32), np.uint8))
    assert delta(share([1], [10]), before, "p").referenced_bytes == 0


def test_a_tensor_of_which_nearly_all_changed_is_written_whole() -> None:
    n = 100
    spec = TensorSpec("t", "uint8", (n,), 1)
    pieces = [Piece(spec, Box((i,), (1,)), i) for i in range(n)]
    after = replace(table_of_pieces(pieces, "n/r00000.pack", "xxh3_128"), digest=np.zeros((n, 16), np.uint8))
    after.digest[:, 0] = np.arange(n)
    before = replace(after, digest=after.digest.copy(), packs=("old/a/r00000.pack",))
    before.digest[2:, 1] = 1
    assert delta(after, before, "new/a/r00000.pack").written_bytes == n
    before.digest[:50, 1] = 0
    assert delta(after, before, "new/a/r00000.pack").written_bytes == 50
