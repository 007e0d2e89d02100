"""The chunk table: for every chunk its element range, its byte range and its checksum, in columns. Pure.

A chunk is a box of one tensor that lies contiguous, row-major, in one pack. Element range (tensor, offset, shape) and
byte range (pack, byte_start, nbytes) are apart, so that neither is derived from the other. Built for millions of
rows: columns are numpy arrays, and nothing loops over rows in Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from elastic.errors import CorruptSnapshot
from elastic.protocol.shares import CHUNK_BYTES
from elastic.snapshot.checksum import algorithm_named
from elastic.snapshot.layout import Box, TensorSpec

if TYPE_CHECKING:
    from elastic.snapshot.save_plan import Piece

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """Chunks in columns, ``n`` rows.

    ``tensor_id`` [n] indexes ``specs``, ``pack_id`` [n] indexes ``packs``. ``offset`` and ``shape`` are [n, d] with d
    the most dimensions of any tensor (at least 1); unused trailing dimensions hold offset 0 and shape 1, so that the
    product of ``shape`` is the number of elements. ``digest`` is uint8 [n, digest bytes of ``algorithm``].
    ``aliases`` are pairs (alias, name of the tensor that holds its data).
    """

    specs: tuple[TensorSpec, ...]
    packs: tuple[str, ...]
    tensor_id: Ids
    offset: Ints
    shape: Ints
    pack_id: Ids
    byte_start: Ints
    nbytes: Ints
    digest: Bytes
    algorithm: str
    aliases: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.tensor_id)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    def box(self, row: int) -> Box:
        """The element range of one chunk, without padding."""
        dims = len(self.specs[self.tensor_id[row]].shape)
        return Box(tuple(self.offset[row, :dims].tolist()), tuple(self.shape[row, :dims].tolist()))

    def describe(self, row: int) -> str:
        """One chunk in words, for messages: tensor, element range, file, byte range."""
        start, end = int(self.byte_start[row]), int(self.byte_start[row] + self.nbytes[row])
        name, pack = self.specs[self.tensor_id[row]].name, self.packs[self.pack_id[row]]
        return f"tensor {name!r} chunk {self.box(row)} in {pack} bytes {start}:{end}"

    def take(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> ChunkTable:
        """The table of some rows, in the order given; specs and packs stay as they are."""
        return replace(
            self,
            tensor_id=self.tensor_id[rows],
            offset=self.offset[rows],
            shape=self.shape[rows],
            pack_id=self.pack_id[rows],
            byte_start=self.byte_start[rows],
            nbytes=self.nbytes[rows],
            digest=self.digest[rows],
        )

    @staticmethod
    def empty(algorithm: str) -> ChunkTable:
        zero, zeros = np.zeros(0, np.int64), np.zeros((0, 1), np.int64)
        ids = np.zeros(0, np.int32)
        digest = np.zeros((0, algorithm_named(algorithm).digest_bytes), np.uint8)
        return ChunkTable((), (), ids, zeros, zeros, ids, zero, zero, digest, algorithm)

    @staticmethod
    def concat(tables: Sequence[ChunkTable]) -> ChunkTable:
        """All rows in order. Tensors merge by name, packs by name. Raises CorruptSnapshot where two tables disagree
        about a tensor's dtype or shape, about an alias, or use different checksums."""
        if not tables:
            raise ValueError("no tables")
        if len(tables) == 1:
            return tables[0]
        algorithms = {table.algorithm for table in tables}
        if len(algorithms) > 1:
            raise CorruptSnapshot(f"chunk tables use different checksums: {', '.join(sorted(algorithms))}")
        specs: dict[str, tuple[int, TensorSpec]] = {}
        packs: dict[str, int] = {}
        aliases: dict[str, str] = {}
        dims = max(table.offset.shape[1] for table in tables)
        tensor_ids, pack_ids = [], []
        for table in tables:
            ids = np.empty(len(table.specs) + 1, np.int32)
            for i, spec in enumerate(table.specs):
                at, known = specs.setdefault(spec.name, (len(specs), spec))
                if known is not spec and known != spec:
                    raise CorruptSnapshot(
                        f"tensor {spec.name!r} is {known.dtype}{list(known.shape)} on one rank "
                        f"and {spec.dtype}{list(spec.shape)} on another"
                    )
                ids[i] = at
            tensor_ids.append(ids[table.tensor_id])
            files = np.array([packs.setdefault(pack, len(packs)) for pack in table.packs] or [0], np.int32)
            pack_ids.append(files[table.pack_id])
            for alias, name in table.aliases:
                if aliases.setdefault(alias, name) != name:
                    raise CorruptSnapshot(f"alias {alias!r} stands for {aliases[alias]!r} and for {name!r}")
        return ChunkTable(
            tuple(spec for _, spec in specs.values()),
            tuple(packs),
            np.concatenate(tensor_ids),
            np.concatenate([_pad(table.offset, dims, 0) for table in tables]),
            np.concatenate([_pad(table.shape, dims, 1) for table in tables]),
            np.concatenate(pack_ids),
            np.concatenate([table.byte_start for table in tables]),
            np.concatenate([table.nbytes for table in tables]),
            np.concatenate([table.digest for table in tables]),
            tables[0].algorithm,
            tuple(sorted(aliases.items())),
        )

    def to_parquet_bytes(self) -> bytes:
        """The table as a Parquet file (see FORMAT.md)."""
        from elastic.snapshot.chunk_file import encode

        return encode(self)

    @staticmethod
    def from_parquet_bytes(data: bytes | memoryview) -> ChunkTable:
        """Inverse of ``to_parquet_bytes``. Raises CorruptSnapshot if the file is no chunk table or refers outside."""
        from elastic.snapshot.chunk_file import decode

        return decode(data)


def _pad(columns: Ints, dims: int, value: int) -> Ints:
    missing = dims - columns.shape[1]
    return columns if not missing else np.pad(columns, ((0, 0), (0, missing)), constant_values=value)


def spec_columns(table: ChunkTable) -> tuple[Ints, Ints]:
    """(shape [tensors, d] padded with 1, itemsize [tensors]) of the table's tensors."""
    specs = table.specs
    whole = np.ones((len(specs), table.offset.shape[1]), np.int64)
    ranks = np.fromiter((len(spec.shape) for spec in specs), np.int64, len(specs))
    for rank in np.unique(ranks).tolist():
        rows = np.flatnonzero(ranks == rank)
        shapes = chain.from_iterable(specs[i].shape for i in rows.tolist())
        whole[rows, :rank] = np.fromiter(shapes, np.int64, len(rows) * rank).reshape(len(rows), rank)
    return whole, np.fromiter((spec.itemsize for spec in specs), np.int64, len(specs))


def chunks_of(piece: Piece) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut a piece into chunks: (offset [n, d], shape [n, d], byte_start [n], nbytes [n]), in the order of the bytes.

    The piece is cut along its first dimension into runs of whole rows of at most CHUNK_BYTES; where a single row is
    larger, along the next dimension, and so on. A 0-d piece has d = 0 and one chunk, an empty piece has none.
    """
    box, itemsize = piece.box, piece.tensor.itemsize
    dims, volume = len(box.shape), box.volume
    if volume * itemsize <= CHUNK_BYTES:
        n = 1 if volume else 0
        return (
            np.array([box.offset], np.int64).reshape(1, dims)[:n],
            np.array([box.shape], np.int64).reshape(1, dims)[:n],
            np.array([piece.offset], np.int64)[:n],
            np.array([volume * itemsize], np.int64)[:n],
        )
    row_bytes, dim = volume * itemsize, -1
    while row_bytes > CHUNK_BYTES:
        dim += 1
        row_bytes //= box.shape[dim]
    run = CHUNK_BYTES // row_bytes
    starts = np.arange(0, box.shape[dim], run, dtype=np.int64)
    outer = math.prod(box.shape[:dim])
    n = outer * len(starts)
    offset = np.tile(np.array(box.offset, np.int64), (n, 1))
    shape = np.tile(np.array(box.shape, np.int64), (n, 1))
    if dim:
        index = np.unravel_index(np.arange(outer), box.shape[:dim])
        offset[:, :dim] += np.repeat(np.stack(index, axis=1), len(starts), axis=0)
        shape[:, :dim] = 1
    offset[:, dim] += np.tile(starts, outer)
    shape[:, dim] = np.tile(np.minimum(run, box.shape[dim] - starts), outer)
    nbytes = shape[:, dim] * row_bytes
    byte_start = piece.offset + np.cumsum(nbytes) - nbytes
    return offset, shape, byte_start, nbytes


def table_of_pieces(
    pieces: Iterable[Piece], pack: str, algorithm: str, aliases: tuple[tuple[str, str], ...] = ()
) -> ChunkTable:
    """The table of one pack that holds ``pieces`` at their offsets; digests are zero until it is sealed."""
    specs: dict[str, tuple[int, TensorSpec]] = {}
    ids: list[int] = []
    counts: list[int] = []
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []
    for piece in pieces:
        chunks = chunks_of(piece)
        ids.append(specs.setdefault(piece.tensor.name, (len(specs), piece.tensor))[0])
        counts.append(len(chunks[2]))
        parts.append(chunks)
    if not parts:
        return replace(ChunkTable.empty(algorithm), packs=(pack,), aliases=aliases)
    dims = max(1, max(part[0].shape[1] for part in parts))
    total = sum(counts)
    return ChunkTable(
        tuple(spec for _, spec in specs.values()),
        (pack,),
        np.repeat(np.array(ids, np.int32), counts),
        np.concatenate([_pad(part[0], dims, 0) for part in parts]),
        np.concatenate([_pad(part[1], dims, 1) for part in parts]),
        np.zeros(total, np.int32),
        np.concatenate([part[2] for part in parts]),
        np.concatenate([part[3] for part in parts]),
        np.zeros((total, algorithm_named(algorithm).digest_bytes), np.uint8),
        algorithm,
        aliases,
    )
