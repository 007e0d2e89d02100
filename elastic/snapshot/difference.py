"""What changed between two snapshots: tensors by how much, everything else by path.

Chunks that lie at the same place with the same checksum are not read; the rest is read from both in windows, so that a
comparison needs the same small memory for any model. Without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.snapshot.box_stream import BoxStream, Raw
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.element_values import values_of
from elastic.snapshot.index import ObjectTrees, SnapshotIndex
from elastic.snapshot.layout import TensorSpec
from elastic.snapshot.sources import VerifiedSource

BLOCK_BYTES = 1 << 20
"""So much is turned into float64 at a time."""


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor whose bits differ. ``changed`` of ``elements`` differ; ``max_abs`` is the largest |b - a|.

    ``relative_norm`` is ‖b - a‖ / ‖a‖ over the chunks that differ: the others are not read. Both are None for a dtype
    without known values; what is not finite on either side is counted in ``not_finite`` and left out of both.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    max_abs: float | None
    relative_norm: float | None
    not_finite: int = 0


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """One value that is not a tensor and differs, by its path in the trees of ``ranks``; None is "not there"."""

    path: str
    before: str | None
    after: str | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """From snapshot a to snapshot b."""

    changed: tuple[TensorChange, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    retyped: tuple[tuple[str, str, str], ...]
    """Name, and dtype and shape in a and in b; values of these are not compared."""
    retied: tuple[str, ...]
    """Names that are tied to another tensor, or not tied any more."""
    objects: tuple[ObjectChange, ...]
    unchanged: int
    """Tensors that are the same, bit for bit."""
    chunks: int
    chunks_read: int
    bytes_read: int

    @property
    def same(self) -> bool:
        """Whether there is no difference at all."""
        return not (self.changed or self.added or self.removed or self.retyped or self.retied or self.objects)


def difference(
    a: SnapshotIndex, source_a: VerifiedSource, b: SnapshotIndex, source_b: VerifiedSource, names: str = ""
) -> Difference:
    """Compare all tensors whose name begins with ``names``, and all objects. Raises CorruptSnapshot for damage."""
    specs_a = {spec.name: spec for spec in a.table.specs if spec.name.startswith(names)}
    specs_b = {spec.name: spec for spec in b.table.specs if spec.name.startswith(names)}
    shared = [name for name in specs_b if name in specs_a]
    retyped = [name for name in shared if specs_a[name] != specs_b[name]]
    comparable = [name for name in shared if specs_a[name] == specs_b[name]]
    aliases_a, aliases_b = dict(a.table.aliases), dict(b.table.aliases)
    differing = _differing_rows(a.table, b.table, comparable)
    changes = list(_compare(a.table, source_a, b.table, source_b, differing))
    return Difference(
        changed=tuple(changes),
        added=tuple(name for name in specs_b if name not in specs_a),
        removed=tuple(name for name in specs_a if name not in specs_b),
        retyped=tuple((name, _kind(specs_a[name]), _kind(specs_b[name])) for name in retyped),
        retied=tuple(
            name
            for name in sorted({*aliases_a, *aliases_b})
            if name.startswith(names) and aliases_a.get(name) != aliases_b.get(name)
        ),
        objects=tuple(object_changes(a.objects, b.objects)),
        unchanged=len(comparable) - len(changes),
        chunks=len(b.table),
        chunks_read=len(differing),
        bytes_read=2 * int(b.table.nbytes[differing].sum()),
    )


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _differing_rows(a: ChunkTable, b: ChunkTable, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Rows of ``b`` of these tensors of which ``a`` has no chunk at the same place with the same checksum."""
    dims = max(a.offset.shape[1], b.offset.shape[1])
    common = {name: i for i, name in enumerate(names)}
    rows_b, keys_b = _keys(b, common, dims)
    if a.algorithm != b.algorithm:
        return rows_b
    _, keys_a = _keys(a, common, dims)
    return rows_b[~np.isin(keys_b, keys_a)]


def _keys(table: ChunkTable, common: Mapping[str, int], dims: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Rows of the tensors in ``common``, and for each one value made of tensor, place and checksum."""
    ids = np.array([common.get(spec.name, -1) for spec in table.specs], np.int64)
    tensor = ids[table.tensor_id] if len(table) else np.zeros(0, np.int64)
    rows = np.flatnonzero(tensor >= 0)
    pad = ((0, 0), (0, dims - table.offset.shape[1]))
    place = np.concatenate(
        [tensor[rows, None], np.pad(table.offset[rows], pad), np.pad(table.shape[rows], pad, constant_values=1)], axis=1
    )
    raw = np.concatenate([np.ascontiguousarray(place).view(np.uint8), table.digest[rows]], axis=1)
    return rows, np.ascontiguousarray(raw).view(f"V{raw.shape[1]}").ravel()


class _Sum:
    """What is known of the change of one tensor while its chunks go by."""

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.changed = self.not_finite = 0
        self.largest = self.square_of_change = self.square_before = 0.0
        self.has_values = True

    def add(self, before: Raw, after: Raw) -> None:
        """Another box, as bytes."""
        step = max(1, BLOCK_BYTES // self.spec.itemsize) * self.spec.itemsize
        for start in range(0, len(before), step):
            self._add(before[start : start + step], after[start : start + step])

    def _add(self, before: Raw, after: Raw) -> None:
        shape = (-1, self.spec.itemsize)
        differs = (before.reshape(shape) != after.reshape(shape)).any(axis=1)
        self.changed += int(differs.sum())
        old, new = values_of(self.spec, before), values_of(self.spec, after)
        if old is None or new is None:
            self.has_values = False
            return
        with np.errstate(all="ignore"):
            change = np.abs(new - old)
            finite = np.isfinite(change)
            self.not_finite += int((differs & ~finite).sum())
            self.largest = max(self.largest, float(change[finite].max(initial=0.0)))
            self.square_of_change += float(np.square(change[finite]).sum())
            self.square_before += float(np.square(np.abs(old[np.isfinite(old)])).sum())

    def result(self) -> TensorChange:
        relative = self.square_of_change**0.5 / self.square_before**0.5 if self.square_before else float("inf")
        return TensorChange(
            self.spec.name,
            self.spec.dtype,
            self.spec.shape,
            self.spec.nbytes // self.spec.itemsize,
            self.changed,
            self.largest if self.has_values else None,
            (relative if self.square_of_change else 0.0) if self.has_values else None,
            self.not_finite,
        )


def _compare(
    a: ChunkTable, source_a: VerifiedSource, b: ChunkTable, source_b: VerifiedSource, rows: npt.NDArray[np.int64]
) -> Iterator[TensorChange]:
    """The tensors of ``rows`` of ``b`` that differ, in the order of the table."""
    rows = rows[np.lexsort((b.byte_start[rows], b.pack_id[rows], b.tensor_id[rows]))]
    wanted = [(b.specs[b.tensor_id[row]].name, b.box(row)) for row in rows.tolist()]
    specs = {spec.name: spec for spec in b.specs}
    current: _Sum | None = None
    for (name, _), before, after in zip(
        wanted, BoxStream(a, source_a).read(wanted), BoxStream(b, source_b).read(wanted), strict=True
    ):
        if current is None or current.spec.name != name:
            if current is not None and current.changed:
                yield current.result()
            current = _Sum(specs[name])
        current.add(before, after)
    if current is not None and current.changed:
        yield current.result()


def object_changes(a: ObjectTrees, b: ObjectTrees) -> Iterator[ObjectChange]:
    """Values that differ between the trees of the ranks that both have."""
    pairs: dict[tuple[str, str], list[int]] = {}
    for rank, (one, other) in enumerate(zip(a.ranks, b.ranks)):
        if one != other:
            pairs.setdefault((one, other), []).append(rank)
    found: dict[tuple[str, str | None, str | None], list[int]] = {}
    for (one, other), ranks in pairs.items():
        for change in _tree_changes("", json.loads(a.trees[one]), json.loads(b.trees[other])):
            found.setdefault(change, []).extend(ranks)
    for (path, before, after), ranks in found.items():
        yield ObjectChange(path, before, after, tuple(sorted(ranks)))


_MISSING = object()
_PAIRS = ("$dict", "$ordered", "$counter")
_SEQUENCES = ("$tuple", "$size")


def _tree_changes(path: str, a: Any, b: Any) -> Iterator[tuple[str, str | None, str | None]]:
    """(path, before, after) of what differs. Read as plain JSON: what stands for a value of torch stays a text."""
    if a is not _MISSING and b is not _MISSING and a == b:
        return
    entries_a, entries_b = _entries(a), _entries(b)
    if entries_a is None or entries_b is None:
        yield path or "the tree", _shown(a), _shown(b)
        return
    for key in [*entries_a, *(key for key in entries_b if key not in entries_a)]:
        below = f"{path}.{key}" if path and not key.startswith("[") else path + key
        yield from _tree_changes(below, entries_a.get(key, _MISSING), entries_b.get(key, _MISSING))


def _entries(value: Any) -> dict[str, Any] | None:
    """What a container holds by key; None for what is no container."""
    if isinstance(value, dict):
        tag, inner = next(iter(value.items()), ("", ()))
        if len(value) == 1 and tag in _PAIRS:
            return {key if isinstance(key, str) else f"[{json.dumps(key)}]": item for key, item in inner}
        if len(value) == 1 and tag in _SEQUENCES:
            return {f"[{i}]": item for i, item in enumerate(inner)}
        return None if len(value) == 1 and tag.startswith("$") else value
    if isinstance(value, list):
        return {f"[{i}]": item for i, item in enumerate(value)}
    return None


def _shown(value: Any) -> str | None:
    if value is _MISSING:
        return None
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
