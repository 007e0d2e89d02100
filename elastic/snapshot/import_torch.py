"""Tensors of a ``torch.save`` file or a DCP directory. Torch's weights_only loader is all that ever unpickles.

A file in torch's zip format is mapped, so that its tensors are read as they are copied; an older one is loaded whole.
Of a DCP directory one stored item is held at a time; its metadata is a pickle, which is read as data (inert_pickle).
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from elastic.errors import CaptureError, ConfigError, CorruptSnapshot, StorageError
from elastic.snapshot.foreign import Foreign, ForeignPart, ForeignTensor
from elastic.snapshot.inert_pickle import Record, Symbol, read_pickle
from elastic.snapshot.layout import Box
from elastic.snapshot.tensor_layout import flat_bytes
from elastic.storage.blob_store import Buffer

DCP_METADATA = ".metadata"


def open_torch_file(path: Path) -> Foreign:
    """The tensors of a file that ``torch.save`` wrote, ties found by their memory.

    Raises ConfigError if it holds more than torch's weights_only loader reads, CorruptSnapshot if it is not whole.
    """
    found = _load(path)
    tensors: dict[tuple[str, ...], torch.Tensor] = {}
    left_out: list[str] = []
    for keys, value in _leaves(found, ()):
        if isinstance(value, torch.Tensor):
            _check(value, ".".join(keys))
            tensors[keys] = value.detach()
        else:
            left_out.append(".".join(keys))
    return Foreign("torch.save", tuple(_with_ties(tensors)), tuple(left_out))


def _load(path: Path) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n", 1)[0]
        raise ConfigError(
            "PATH", str(path), f"torch's weights_only loader refuses it ({reason}); save model.state_dict() alone"
        ) from error
    except OSError as error:
        raise StorageError(f"the file cannot be read: {error.strerror}", str(path)) from error
    except (RuntimeError, ValueError, EOFError, KeyError, AttributeError, TypeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise CorruptSnapshot(f"not a file of torch.save: {reason}", str(path)) from error


def _leaves(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*keys, str(key)))
    elif isinstance(value, (list, tuple)) and value:
        for number, item in enumerate(value):
            yield from _leaves(item, (*keys, str(number)))
    else:
        yield keys or ("value",), value


def _check(tensor: torch.Tensor, name: str) -> None:
    kind = ""
    if tensor.layout != torch.strided:
        kind = f"a sparse tensor ({tensor.layout})"
    elif tensor.is_quantized:
        kind = f"a quantized tensor ({tensor.dtype})"
    elif tensor.device.type == "meta":
        kind = "a tensor on the meta device, which has no values"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"a tensor of type {type(tensor).__name__}"
    if kind:
        raise CaptureError(f"cannot import {kind}", name, "save it as a dense tensor")


def _with_ties(tensors: dict[tuple[str, ...], torch.Tensor]) -> Iterator[ForeignTensor]:
    first: dict[object, tuple[str, ...]] = {}
    for keys, tensor in tensors.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else keys
        holder = first.setdefault(memory, keys)
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        box = Box((0,) * len(shape), shape)
        parts = (ForeignPart(box, _reader(lambda tensor=tensor: tensor)),)  # type: ignore[misc]
        tied = holder if holder != keys else ()
        yield ForeignTensor(keys, dtype, shape, tensor.dtype.itemsize, () if tied else parts, tied)


def _reader(load: Callable[[], torch.Tensor]) -> Callable[[int, int], Buffer]:
    """Bytes of the tensor that ``load`` gives, row-major; it is held from the first byte to the last."""
    held: list[memoryview] = []

    def read(start: int, stop: int) -> Buffer:
        if not held:
            tensor = load().resolve_conj().resolve_neg().contiguous()
            held.append(flat_bytes(tensor).numpy().data)
        part = held[0][start:stop]
        if stop == held[0].nbytes:
            held.clear()
        return part

    return read


def open_dcp(directory: Path) -> Foreign:
    """The tensors of a directory of ``torch.distributed.checkpoint``, in the boxes in which its ranks wrote them.

    Raises CorruptSnapshot if the metadata is none, or names a file outside of the directory.
    """
    where = str(directory / DCP_METADATA)
    metadata = read_pickle((directory / DCP_METADATA).read_bytes(), where)
    try:
        paths = metadata.get("planner_data") or {}
        items = {_key(index): info for index, info in metadata.get("storage_data").items()}
        tensors, left_out = [], []
        for name, entry in metadata.get("state_dict_metadata").items():
            keys = tuple(map(str, paths.get(name, (name,))))
            if entry.symbol.name != "TensorStorageMetadata":
                left_out.append(".".join(keys))
                continue
            dtype = _torch_dtype(entry.get("properties"))
            shape = _ints(entry.get("size"))
            parts = tuple(
                _part(directory, name, _ints(chunk.get("offsets")), _ints(chunk.get("sizes")), dtype, items)
                for chunk in entry.get("chunks")
            )
            tensors.append(ForeignTensor(keys, str(dtype).removeprefix("torch."), shape, dtype.itemsize, parts))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptSnapshot(f"not the metadata of a DCP directory: {type(error).__name__}: {error}", where) from error
    return Foreign("DCP", tuple(tensors), tuple(left_out))


def _part(
    directory: Path,
    name: str,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    items: dict[tuple[str, tuple[int, ...]], Record],
) -> ForeignPart:
    info = items[(name, offset)]
    file, start, length = str(info.get("relative_path")), int(info.get("offset")), int(info.get("length"))
    if info.get("transform_descriptors"):
        raise ValueError(f"tensor {name!r} was written through an extension ({info.get('transform_descriptors')})")
    if file != os.path.basename(file) or file in ("", ".", ".."):
        raise ValueError(f"tensor {name!r} lies in {file!r}, which is not a file beside the metadata")

    def load() -> torch.Tensor:
        path = directory / file
        try:
            with open(path, "rb") as stream:
                stream.seek(start)
                body = stream.read(length)
            tensor = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
        except OSError as error:
            raise StorageError(f"the file cannot be read: {error.strerror}", str(path)) from error
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
            raise CorruptSnapshot(f"the item of tensor {name!r} cannot be read", f"{path} at {start}") from error
        if not isinstance(tensor, torch.Tensor) or (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise CorruptSnapshot(f"the item of tensor {name!r} is not what the metadata says", f"{path} at {start}")
        _check(tensor, name)
        return tensor.detach()

    return ForeignPart(Box(offset, shape), _reader(load))


def _key(index: Record) -> tuple[str, tuple[int, ...]]:
    offset = index.get("offset")
    return str(index.get("fqn")), _ints(offset) if offset is not None else ()


def _ints(size: Record) -> tuple[int, ...]:
    """A ``torch.Size`` in a pickle."""
    (values,) = size.arguments
    return tuple(map(int, values))


def _torch_dtype(properties: Record) -> torch.dtype:
    """The dtype of a ``TensorProperties`` in a pickle: the first of its state, in whatever form that comes."""
    state = properties.state
    symbol = state[0] if isinstance(state, tuple) else properties.get("dtype")
    dtype = getattr(torch, symbol.name, None) if isinstance(symbol, Symbol) and symbol.module == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype {symbol} is not known to this torch ({torch.__version__})")
    return dtype
