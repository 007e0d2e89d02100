"""Tensors of another format on their way into a snapshot, and which of them are meant. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastic.errors import ConfigError
from elastic.snapshot.layout import Box
from elastic.storage.blob_store import Buffer

Read = Callable[[int, int], Buffer]
"""Bytes ``start`` to ``stop`` of a box, row-major. Asked for in order; valid until the next call."""


@dataclass(frozen=True, slots=True)
class ForeignPart:
    """A box of a tensor and how to read it."""

    box: Box
    read: Read


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor by the keys that lead to it; ``tied_to`` are those of the tensor that holds its data, or empty."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    parts: tuple[ForeignPart, ...]
    tied_to: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The keys with dots between."""
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Foreign:
    """What a file or directory holds. ``left_out`` names what is no tensor."""

    kind: str
    tensors: tuple[ForeignTensor, ...]
    left_out: tuple[str, ...] = ()


def weights_of(found: Foreign, part: str | None) -> tuple[ForeignTensor, ...]:
    """The tensors under ``part`` (``model``), which their names then lack; without it all of them, or those of the only
    part that holds any. Raises ConfigError if that is nothing, or not clear."""
    if not found.tensors:
        raise ConfigError("PATH", found.kind, "it holds no tensor")
    if part is not None:
        head = tuple(part.split("."))
        inside = [_below(tensor, head) for tensor in found.tensors]
        chosen = tuple(tensor for tensor in inside if tensor is not None)
        if not chosen:
            raise ConfigError("--part", part, f"no name begins so; there are {_parts(found.tensors)}")
        return chosen
    tensors = found.tensors
    while all(len(tensor.path) > 1 for tensor in tensors):
        heads = {tensor.path[0] for tensor in tensors}
        if len(heads) > 1:
            raise ConfigError("--part", None, f"say which part holds the weights: {_parts(tensors)}")
        tensors = tuple(below for tensor in tensors if (below := _below(tensor, tensor.path[:1])) is not None)
    if any(len(tensor.path) > 1 for tensor in tensors):
        raise ConfigError("--part", None, f"say which part holds the weights: {_parts(tensors)}")
    return tensors


def _below(tensor: ForeignTensor, head: tuple[str, ...]) -> ForeignTensor | None:
    """The tensor without ``head`` in front, whether keys or dots divide its name; None if it does not begin so."""
    if tensor.path[: len(head)] == head and len(tensor.path) > len(head):
        tied = tensor.tied_to[len(head) :] if tensor.tied_to[: len(head)] == head else ()
        return replace(tensor, path=tensor.path[len(head) :], tied_to=tied)
    text = ".".join(head) + "."
    if not tensor.name.startswith(text):
        return None
    other = ".".join(tensor.tied_to)
    tied = (other.removeprefix(text),) if other.startswith(text) else ()
    return replace(tensor, path=(tensor.name.removeprefix(text),), tied_to=tied)


def _parts(tensors: Sequence[ForeignTensor]) -> str:
    counts: dict[str, int] = {}
    for tensor in tensors:
        head = tensor.path[0] if len(tensor.path) > 1 else tensor.name.partition(".")[0]
        counts[head] = counts.get(head, 0) + 1
    shown = [f"{head} ({count} tensor{'s' * (count > 1)})" for head, count in list(counts.items())[:8]]
    return ", ".join(shown) + (" …" if len(counts) > 8 else "")
