"""Tensors of safetensors files: one file, or shards with their index. Read in ranges, never as a whole."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

from elastic.errors import CorruptSnapshot, StorageError
from elastic.snapshot.foreign import Foreign, ForeignPart, ForeignTensor
from elastic.snapshot.safetensors_file import INDEX_SUFFIX, Header, StoredTensor, read_header

KIND = "safetensors"


def open_safetensors(path: Path) -> Foreign:
    """The tensors of a file, or of all files that an index (``*.safetensors.index.json``) names.

    Raises CorruptSnapshot for what is no such file, is cut short, or names a file outside of its directory.
    """
    if not path.name.endswith(INDEX_SUFFIX):
        return _foreign({path: _header(path)}, None)
    try:
        index = json.loads(path.read_bytes())
        places = {str(name): str(file) for name, file in index["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptSnapshot(f"not an index of safetensors files: {error}", str(path)) from error
    for file in places.values():
        if file != os.path.basename(file) or file in ("", ".", ".."):
            raise CorruptSnapshot(f"the index names {file!r}, which is not a file beside it", str(path))
    headers = {path.with_name(file): _header(path.with_name(file)) for file in sorted(set(places.values()))}
    held = {(stored.spec.name, file.name) for file, header in headers.items() for stored in header.tensors}
    if missing := sorted(set(places.items()) - held):
        name, file = missing[0]
        raise CorruptSnapshot(f"tensor {name!r} is not in {file}, where the index says that it is", str(path))
    return _foreign(headers, set(places))


def _header(path: Path) -> Header:
    try:
        with open(path, "rb") as file:
            return read_header(file, str(path))
    except OSError as error:
        raise StorageError(f"the file cannot be read: {error.strerror}", str(path)) from error


def _foreign(headers: dict[Path, Header], names: set[str] | None) -> Foreign:
    tensors: dict[str, ForeignTensor] = {}
    for path, header in headers.items():
        for stored in header.tensors:
            if names is None or stored.spec.name in names:
                tensors[stored.spec.name] = _tensor(path, stored)
    for header in headers.values():
        for other, name in header.metadata.items():
            if name in tensors and other not in tensors:
                tensors[other] = _tied(tensors[name], other)
    return Foreign(KIND, tuple(tensors.values()))


def _tensor(path: Path, stored: StoredTensor) -> ForeignTensor:
    spec = stored.spec
    part = ForeignPart(spec.box, partial(_read, path, stored.start))
    return ForeignTensor((spec.name,), spec.dtype, spec.shape, spec.itemsize, (part,))


def _tied(tensor: ForeignTensor, name: str) -> ForeignTensor:
    return ForeignTensor((name,), tensor.dtype, tensor.shape, tensor.itemsize, (), tensor.path)


def _read(path: Path, begin: int, start: int, stop: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        file.seek(begin + start)
        parts = []
        left = stop - start
        while left and (part := file.read(left)):
            parts.append(part)
            left -= len(part)
    if left:
        raise CorruptSnapshot(f"the file ends {left} bytes early", str(path), "copy it again")
    return parts[0] if len(parts) == 1 else b"".join(parts)
