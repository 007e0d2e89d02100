"""The safetensors container, from its public format: 8 bytes with the length of the header, the header, the data.

The header is JSON: per tensor its dtype, shape and byte range in the data, and ``__metadata__``, texts by name. The
data has no holes. Tied names are not written twice: as is usual, ``__metadata__`` maps such a name to the one that
holds its data.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from elastic.errors import ConfigError, CorruptSnapshot
from elastic.snapshot.layout import TensorSpec

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""Torch's name of a dtype to the format's."""

ITEM_BYTES = {"64": 8, "32": 4, "16": 2}
METADATA = "__metadata__"
INDEX_SUFFIX = ".safetensors.index.json"
LARGEST_HEADER_BYTES = 100_000_000
"""What readers of the format accept."""

_LENGTH = struct.Struct("<Q")
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: its bytes are ``spec.nbytes`` from ``start``, counted from the beginning of the file."""

    spec: TensorSpec
    start: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]


def check_dtype(spec: TensorSpec) -> None:
    """Raise ConfigError for a dtype that the format does not have."""
    if spec.dtype not in DTYPES:
        raise ConfigError("--to", "safetensors", f"it has no dtype {spec.dtype} for tensor {spec.name!r}; use --to dcp")


def header_bytes(tensors: Sequence[tuple[str, TensorSpec]], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file that holds ``tensors`` (name in the file, tensor) one after another."""
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name, spec in tensors:
        entries[name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER_BYTES:
        raise ConfigError("--shard-size", "this", "a file of so many tensors has too long a header; use smaller shards")
    return _LENGTH.pack(len(text)) + text


def read_header(file: BinaryIO, where: str) -> Header:
    """The header of an open file, checked against its size. Raises CorruptSnapshot if it is not whole and sound."""
    size = os.fstat(file.fileno()).st_size
    try:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if length > min(LARGEST_HEADER_BYTES, size - _LENGTH.size):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        entries = json.loads(file.read(length))
        metadata = {str(key): str(value) for key, value in (entries.pop(METADATA, None) or {}).items()}
        data = _LENGTH.size + length
        found = [_stored(name, entry, data) for name, entry in entries.items()]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptSnapshot(f"not a safetensors file: {type(error).__name__}: {error}", where) from error
    end = data
    for stored in sorted(found, key=lambda stored: (stored.start, stored.spec.nbytes)):
        if stored.start != end:
            raise CorruptSnapshot(f"tensor {stored.spec.name!r} does not begin where the one before it ends", where)
        end += stored.spec.nbytes
    if end != size:
        raise CorruptSnapshot(f"the file has {size} bytes, its header speaks of {end}", where, "copy it again")
    return Header(tuple(found), metadata)


def _stored(name: str, entry: Mapping[str, Any], data: int) -> StoredTensor:
    dtype = _TORCH.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"tensor {name!r} has the dtype {entry['dtype']!r}, which is not known here")
    digits = entry["dtype"].partition("_")[0].lstrip("BFIUC")
    shape = tuple(int(n) for n in entry["shape"])
    spec = TensorSpec(name, dtype, shape, ITEM_BYTES.get(digits, 1))
    start, stop = entry["data_offsets"]
    if min(shape, default=0) < 0 or stop - start != math.prod(shape) * spec.itemsize:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} has {stop - start} bytes")
    return StoredTensor(spec, data + int(start))
