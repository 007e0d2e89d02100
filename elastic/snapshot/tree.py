"""Everything attached that is not a tensor, as canonical JSON: exact on the way back, and never code.

Plain JSON says what it can say (None, bool, str, list, finite float, 64-bit int, dict with plain string keys); all
else is an object with one key that begins with ``$`` (a dict that has such keys of its own is written as pairs):

    $dict [[k, v], …]     keys that are no strings, or begin with $     $tuple, $set, $frozenset [v, …]
    $ordered, $counter    as $dict, for OrderedDict and Counter         $bytes, $bytearray "base64"
    $int "0x…"            beyond 64 bits                                $complex [re, im]
    $float "16 hex"       nan (with its payload) and ±inf               $size [n, …]   torch.Size
    $numpy [dtype, data]  a numpy scalar                                $dtype, $device "name"   of torch
    $array [dtype, shape, data]                                         $tensor name | [name, expanded shape]
    $value [dtype, shape, data]   a small tensor kept inline

The order of a dict is part of the tree. The same tree always gives the same bytes.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _quote
from typing import Any

import numpy as np

from elastic.errors import CaptureError, CorruptSnapshot

MAX_ARRAY_BYTES = 16 << 20
"""Largest numpy array that is kept inside a tree; a bigger one belongs in a tensor."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor that is saved under ``name``; ``expanded`` is its full shape if it was a broadcast."""

    name: str
    expanded: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A small tensor inside a tree: dtype (torch's name), shape and row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Encoded:
    """A subtree whose text was made before and did not change since."""

    text: str


class _Unsupported(Exception):
    """Carries the key path outwards, innermost key first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.keys = what, []  # type: str, list[object]


def encode(tree: object, where: str = "") -> bytes:
    """Canonical JSON of ``tree``. Raises CaptureError naming the key path and the type of what cannot be written."""
    return encode_text(tree, where).encode("ascii")


def encode_text(tree: object, where: str = "") -> str:
    """As ``encode``, as text; ``Encoded(encode_text(part))`` may stand for ``part`` in a larger tree."""
    parts: list[str] = []
    try:
        _write(tree, parts.append)
    except _Unsupported as problem:
        path = where + "".join(f"[{key!r}]" for key in reversed(problem.keys))
        raise CaptureError(
            f"cannot save {problem.what}", path or "the state", "return plain values and tensors from state_dict()"
        ) from None
    except RecursionError:
        raise CaptureError("the state holds itself, or is nested too deeply", where or "the state") from None
    return "".join(parts)


def decode(data: bytes | str) -> Any:
    """The tree that ``encode`` was given; tensors are left as TensorRef and TensorValue. Never runs code."""
    try:
        return json.loads(data, object_pairs_hook=_read)
    except CorruptSnapshot:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, struct.error) as error:
        raise CorruptSnapshot(f"the objects of the snapshot cannot be read: {error}") from error


Put = Callable[[str], Any]


def _write(value: object, put: Put) -> None:
    writer = _WRITERS.get(type(value))
    if writer is not None:
        writer(value, put)
    elif isinstance(value, np.generic):
        array = np.asarray(value)
        put(f'{{"$numpy":[{_quote(_dtype(array))},"{_base64(array.tobytes())}"]}}')
    elif type(value).__module__ == "torch":
        _write_torch(value, put)
    else:
        kind = type(value)
        raise _Unsupported(f"an object of type {kind.__module__}.{kind.__qualname__}")


def _write_items(items: Iterable[tuple[object, object]], put: Put) -> None:
    """Key and value pairs between brackets already put."""
    first = True
    for key, value in items:
        put("[" if first else ",[")
        first = False
        try:
            _write(key, put)
            put(",")
            _write(value, put)
        except _Unsupported as problem:
            problem.keys.append(key)
            raise
        put("]")


def _write_dict(value: Mapping[Any, object], put: Put) -> None:
    if not all(type(key) is str and key[:1] != "$" for key in value):
        put('{"$dict":[')
        _write_items(value.items(), put)
        put("]}")
        return
    comma = "{"
    for key, item in value.items():
        put(comma + _quote(key) + ":")
        comma = ","
        try:
            _write(item, put)
        except _Unsupported as problem:
            problem.keys.append(key)
            raise
    put("}" if value else "{}")


def _write_pairs(tag: str) -> Callable[[Any, Put], None]:
    def write(value: Mapping[Any, object], put: Put) -> None:
        put(f'{{"{tag}":[')
        _write_items(value.items(), put)
        put("]}")

    return write


def _write_list(value: Iterable[object], put: Put) -> None:
    comma = "["
    for index, item in enumerate(value):
        put(comma)
        comma = ","
        try:
            _write(item, put)
        except _Unsupported as problem:
            problem.keys.append(index)
            raise
    put("]" if comma == "," else "[]")


def _write_sequence(tag: str) -> Callable[[Any, Put], None]:
    def write(value: Iterable[object], put: Put) -> None:
        put(f'{{"{tag}":')
        _write_list(value, put)
        put("}")

    return write


def _write_set(tag: str) -> Callable[[Any, Put], None]:
    def write(value: Iterable[object], put: Put) -> None:
        texts = []
        for item in value:
            parts: list[str] = []
            _write(item, parts.append)
            texts.append("".join(parts))
        put(f'{{"{tag}":[' + ",".join(sorted(texts)) + "]}")

    return write


def _write_int(value: int, put: Put) -> None:
    put(repr(value) if -(1 << 63) <= value < 1 << 63 else f'{{"$int":"{value:#x}"}}')


def _write_float(value: float, put: Put) -> None:
    put(repr(value) if math.isfinite(value) else f'{{"$float":"{struct.pack(">d", value).hex()}"}}')


def _write_complex(value: complex, put: Put) -> None:
    put('{"$complex":[')
    _write_float(value.real, put)
    put(",")
    _write_float(value.imag, put)
    put("]}")


def _write_array(value: np.ndarray[Any, Any], put: Put) -> None:
    if value.nbytes > MAX_ARRAY_BYTES:
        raise _Unsupported(f"a numpy array of {value.nbytes} bytes (keep big arrays as torch tensors)")
    put(f'{{"$array":[{_quote(_dtype(value))},{json.dumps(list(value.shape))},"{_base64(value.tobytes())}"]}}')


def _write_ref(value: TensorRef, put: Put) -> None:
    name = _quote(value.name)
    put(f'{{"$tensor":{name if value.expanded is None else f"[{name},{json.dumps(list(value.expanded))}]"}}}')


def _write_torch(value: object, put: Put) -> None:
    torch = sys.modules["torch"]
    if isinstance(value, torch.dtype):
        put(f'{{"$dtype":{_quote(str(value).removeprefix("torch."))}}}')
    elif isinstance(value, torch.device):
        put(f'{{"$device":{_quote(str(value))}}}')
    elif isinstance(value, torch.Size):
        put(f'{{"$size":{json.dumps(list(value))}}}')
    else:
        raise _Unsupported(f"an object of type torch.{type(value).__name__}")


def _dtype(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.kind not in "biufcSUmM":
        raise _Unsupported(f"a numpy array of dtype {array.dtype}")
    return str(array.dtype.str)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_WRITERS: dict[type, Callable[[Any, Put], None]] = {
    type(None): lambda value, put: put("null"),
    bool: lambda value, put: put("true" if value else "false"),
    str: lambda value, put: put(_quote(value)),
    int: _write_int,
    float: _write_float,
    complex: _write_complex,
    bytes: lambda value, put: put(f'{{"$bytes":"{_base64(value)}"}}'),
    bytearray: lambda value, put: put(f'{{"$bytearray":"{_base64(value)}"}}'),
    list: _write_list,
    tuple: _write_sequence("$tuple"),
    dict: _write_dict,
    OrderedDict: _write_pairs("$ordered"),
    Counter: _write_pairs("$counter"),
    set: _write_set("$set"),
    frozenset: _write_set("$frozenset"),
    np.ndarray: _write_array,
    TensorRef: _write_ref,
    TensorValue: lambda v, put: put(
        f'{{"$value":[{_quote(v.dtype)},{json.dumps(list(v.shape))},"{_base64(v.data)}"]}}'
    ),
    Encoded: lambda value, put: put(value.text),
}


def _read(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) != 1 or pairs[0][0][:1] != "$":
        return dict(pairs)
    tag, value = pairs[0]
    reader = _READERS.get(tag)
    if reader is None:
        raise CorruptSnapshot(f"the objects of the snapshot hold an unknown kind of value {tag!r}")
    return reader(value)


def _read_array(value: list[Any]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(value[0])
    if dtype.hasobject:
        raise CorruptSnapshot(f"a numpy array of dtype {value[0]!r} holds Python objects and is not read")
    array: np.ndarray[Any, Any] = np.frombuffer(base64.b64decode(value[2]), dtype)
    return np.array(array.reshape(value[1]))


def _read_ref(value: Any) -> TensorRef:
    return TensorRef(value) if isinstance(value, str) else TensorRef(value[0], tuple(value[1]))


def _torch_dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CorruptSnapshot(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return found


def _torch(kind: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        import torch

        return getattr(torch, kind)(value)

    return read


_READERS: dict[str, Callable[[Any], Any]] = {
    "$dict": lambda value: {key: item for key, item in value},  # noqa: C416
    "$ordered": lambda value: OrderedDict((key, item) for key, item in value),
    "$counter": lambda value: Counter({key: item for key, item in value}),  # noqa: C416
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$bytes": lambda value: base64.b64decode(value),
    "$bytearray": lambda value: bytearray(base64.b64decode(value)),
    "$int": lambda value: int(value, 16),
    "$float": lambda value: struct.unpack(">d", bytes.fromhex(value))[0],
    "$complex": lambda value: complex(*value),
    "$numpy": lambda value: _read_array([value[0], [], value[1]])[()],
    "$array": _read_array,
    "$tensor": _read_ref,
    "$value": lambda value: TensorValue(value[0], tuple(value[1]), base64.b64decode(value[2])),
    "$size": _torch("Size"),
    "$dtype": _torch_dtype,
    "$device": _torch("device"),
}
