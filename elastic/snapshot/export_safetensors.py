"""A snapshot as safetensors files, written in one pass with a small memory. Without torch and without the package."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from elastic.errors import ConfigError
from elastic.snapshot.box_stream import BoxStream, Raw, cut
from elastic.snapshot.export import Export, ExportedTensor, ExportReport, new_directory
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.safetensors_file import INDEX_SUFFIX, check_dtype, header_bytes
from elastic.snapshot.sources import VerifiedSource

SHARD_BYTES = 5_000_000_000
STEM = "model"


def export_safetensors(
    index: SnapshotIndex,
    source: VerifiedSource,
    chosen: Export,
    out: str | os.PathLike[str],
    shard_bytes: int = SHARD_BYTES,
) -> ExportReport:
    """Write ``model.safetensors``, or numbered shards of at most ``shard_bytes`` (a larger tensor has one to itself)
    and ``model.safetensors.index.json``. Each file takes its name when it is whole and synced; the index is last.

    Raises ConfigError for a dtype that the format lacks, CorruptSnapshot if a chunk has no good copy.
    """
    if shard_bytes < 1:
        raise ConfigError("--shard-size", shard_bytes, "give a number of bytes above 0")
    for tensor in chosen.tensors:
        check_dtype(tensor.spec)
    shards = list(_shards(chosen, shard_bytes))
    stream = BoxStream(index.table, source)
    count = len(shards)
    names = [f"{STEM}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = [f"{STEM}.safetensors"] if count == 1 else names
    with new_directory(out) as directory:
        for name, shard in zip(names, shards):
            _write(directory / name, shard, chosen, stream)
        total = sum(tensor.spec.nbytes for tensor in chosen.tensors)
        if count > 1:
            weight_map = {tensor.name: name for name, shard in zip(names, shards) for tensor in shard}
            body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            names.append(f"{STEM}{INDEX_SUFFIX}")
            _write_whole(directory / names[-1], iter([json.dumps(body, indent=2).encode()]))
        _sync(directory)
    notes = (f"tied names, in __metadata__ without data of their own: {len(chosen.ties)}",) if chosen.ties else ()
    return ExportReport(str(out), tuple(names), len(chosen.tensors), total, chosen.left_out, notes)


def _shards(chosen: Export, shard_bytes: int) -> Iterator[list[ExportedTensor]]:
    """The tensors in order, by files; in each the larger items first, so that every tensor is aligned to its items."""
    shard: list[ExportedTensor] = []
    size = 0
    for tensor in chosen.tensors:
        if shard and size + tensor.spec.nbytes > shard_bytes:
            yield sorted(shard, key=lambda tensor: -tensor.spec.itemsize)
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.spec.nbytes
    yield sorted(shard, key=lambda tensor: -tensor.spec.itemsize)


def _write(path: Path, shard: list[ExportedTensor], chosen: Export, stream: BoxStream) -> None:
    held = {tensor.name for tensor in shard}
    metadata = {"format": "pt"} | {tie.name: name for tie, name in chosen.ties if name in held}
    wanted = [(tensor.spec.name, box) for tensor in shard for box in cut(tensor.spec)]

    def parts() -> Iterator[bytes | Raw]:
        yield header_bytes([(tensor.name, tensor.spec) for tensor in shard], metadata)
        yield from stream.read(wanted)

    _write_whole(path, parts())


def _write_whole(path: Path, parts: Iterator[bytes | Raw]) -> None:
    unfinished = path.with_name(f".{path.name}.part")
    with open(unfinished, "wb", buffering=0) as file:
        for part in parts:
            view = part.data if isinstance(part, np.ndarray) else memoryview(part)
            while view.nbytes:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
