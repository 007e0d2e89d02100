"""Documents of any length packed into sequences of one length, without losing or repeating a token.

``split``   All documents of an epoch, in a seeded order of their own for that epoch, form one stream that is cut every
            ``sequence_length`` tokens. No padding but in the last pack. The cut may fall inside a document; its two
            pieces do not see each other, but the last token of the first still has its target.
``whole``   A document is cut only if it is longer than a sequence. Pieces are put into the pack at hand while they
            fit (next-fit, in a seeded order); what is left is padding. The packs are the same in every epoch, their
            order is the loader's.

Either way item ``i`` is a function of (documents, seed, i) alone, so the loader's cursor is exact inside a pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from elastic.data.order import Ids, Order, derive_seed
from elastic.errors import ConfigError

__all__ = ["ArrayDocuments", "Documents", "PackedDataset", "document_mask"]

IGNORED_TARGET = -100
_ORDER_OF_DOCUMENTS = 0x0D0C5
_NONE: Ids = np.empty(0, dtype=np.int64)


class Documents(Protocol):
    """Documents as one stream of tokens: document ``d`` is the stream from ``offsets[d]`` to ``offsets[d + 1]``."""

    @property
    def offsets(self) -> Ids: ...

    @property
    def lengths(self) -> Ids: ...

    @property
    def digest(self) -> str: ...

    def read(self, start: int, stop: int) -> npt.NDArray[Any]: ...


class ArrayDocuments:
    """Documents that are in memory already: a list of one-dimensional arrays (or lists) of token ids."""

    def __init__(self, documents: list[Any]) -> None:
        arrays = [np.asarray(document, dtype=np.int64) for document in documents]
        self.lengths: Ids = np.array([array.size for array in arrays], dtype=np.int64)
        self.offsets: Ids = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self._stream: Ids = np.concatenate([*arrays, np.empty(0, dtype=np.int64)])
        self.digest = xxhash.xxh3_128_hexdigest(self.lengths.tobytes() + self._stream.tobytes())

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        return self._stream[start:stop]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of documents in the order of the packs; pack ``p`` holds pieces ``first[p]`` to ``first[p + 1]``.

    ``filled[p]`` is the number of tokens in all packs before. Neither is kept for ``split``, where they are known.
    """

    document: Ids
    begin: Ids
    length: Ids
    first: Ids
    filled: Ids


class PackedDataset:
    """Packs of ``sequence_length`` tokens, made of documents (``TokenFiles`` or ``ArrayDocuments``).

    Item ``i`` is a dict of int64 tensors of shape (sequence_length,):

    ``tokens``        the tokens; padding is ``pad_token``
    ``targets``       the next token of the same document; -100 (ignored) at a document's end and on padding
    ``position_ids``  0, 1, ... from the beginning of each piece of a document
    ``document_ids``  the number of the document, -1 on padding: tokens may attend where these are equal
                      (``document_mask``)

    Every token of every document stands in exactly one pack of an epoch. ``documents="split"`` packs every epoch
    anew: it takes ``index + epoch * len``, which ``ElasticLoader`` gives. ``documents="whole"`` keeps documents
    together at the price of padding. See the head of the module.

    Raises ConfigError if there is no token, or for another value of ``mode``.
    """

    def __init__(
        self,
        documents: Documents,
        sequence_length: int,
        *,
        mode: str = "split",
        seed: int = 0,
        pad_token: int = 0,
    ) -> None:
        if sequence_length < 1:
            raise ConfigError("sequence_length", sequence_length, "must be at least 1 token")
        if mode not in ("split", "whole"):
            raise ConfigError("mode", mode, 'is "split" (documents are cut at the ends of packs) or "whole"')
        self._documents = documents
        self._total = int(documents.lengths.sum())
        if not self._total:
            raise ConfigError("documents", len(documents.lengths), "hold no token at all; check what was written")
        self.sequence_length, self.mode, self.seed, self.pad_token = sequence_length, mode, seed, pad_token
        self._order = Order(len(documents.lengths), derive_seed(seed, _ORDER_OF_DOCUMENTS))
        self._cached: dict[int, _Pieces] = {}
        self._length = -(-self._total // sequence_length) if mode == "split" else self._pieces(0).first.size - 1

    @property
    def numbered_epochs(self) -> bool:
        return self.mode == "split"

    @property
    def fingerprint(self) -> str:
        return f"packs:{self._documents.digest}:{self.sequence_length}:{self.mode}:{self.seed}"

    def token_count(self, ids: Ids) -> int:
        """Return how many tokens, padding not counted, these packs hold."""
        if self.mode == "split":
            missing = self._length * self.sequence_length - self._total
            last_packs = int((ids % self._length == self._length - 1).sum())
            return len(ids) * self.sequence_length - last_packs * missing
        pieces = self._pieces(0)
        return int((pieces.filled[ids + 1] - pieces.filled[ids]).sum())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index < 0 or (index >= self._length and not self.numbered_epochs):
            raise IndexError(f"pack {index} of {self._length}")
        epoch, pack = divmod(int(index), self._length)
        size = self.sequence_length
        tokens = np.full(size, self.pad_token, dtype=np.int64)
        targets = np.full(size, IGNORED_TARGET, dtype=np.int64)
        position_ids = np.zeros(size, dtype=np.int64)
        document_ids = np.full(size, -1, dtype=np.int64)
        at = 0
        for document, begin, length in self._in_pack(epoch, pack):
            start, end = int(self._documents.offsets[document]), int(self._documents.offsets[document + 1])
            piece = self._documents.read(start + begin, min(start + begin + length + 1, end))
            tokens[at : at + length] = piece[:length]
            targets[at : at + len(piece) - 1] = piece[1:]
            position_ids[at : at + length] = np.arange(length)
            document_ids[at : at + length] = document
            at += length
        arrays = {"tokens": tokens, "targets": targets, "position_ids": position_ids, "document_ids": document_ids}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _in_pack(self, epoch: int, pack: int) -> list[tuple[int, int, int]]:
        """Return (document, first token in it, tokens) of each piece in the pack."""
        pieces = self._pieces(epoch)
        if self.mode == "whole":
            a, b = int(pieces.first[pack]), int(pieces.first[pack + 1])
            columns = (pieces.document[a:b], pieces.begin[a:b], pieces.length[a:b])
            return list(zip(*(column.tolist() for column in columns), strict=True))
        # Here a piece is a whole document, and `begin` is where it begins in the epoch's stream.
        start = pack * self.sequence_length
        stop = min(start + self.sequence_length, self._total)
        number = int(np.searchsorted(pieces.begin, start, side="right")) - 1
        found = []
        while start < stop:
            begin, length = int(pieces.begin[number]), int(pieces.length[number])
            end = min(begin + length, stop)
            if end > start:
                found.append((int(pieces.document[number]), start - begin, end - start))
                start = end
            number += 1
        return found

    def _pieces(self, epoch: int) -> _Pieces:
        if epoch not in self._cached:
            while len(self._cached) >= 2:  # a batch may lie across two epochs, never more matter
                del self._cached[min(self._cached)]
            count = len(self._documents.lengths)
            order = self._order.ids(epoch * count, (epoch + 1) * count)
            lengths = self._documents.lengths[order]
            if self.mode == "split":
                begins = np.cumsum(lengths) - lengths
                self._cached[epoch] = _Pieces(order, begins, lengths, _NONE, _NONE)
            else:
                self._cached[epoch] = _fitted(order, lengths, self.sequence_length)
        return self._cached[epoch]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": {}}


def _fitted(order: Ids, lengths: Ids, size: int) -> _Pieces:
    """Cut what is longer than ``size``, and hand the pieces to packs, each while the next still fits."""
    parts = -(-lengths // size)
    document = np.repeat(order, parts)
    number = np.arange(document.size) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = number * size
    length = np.minimum(size, np.repeat(lengths, parts) - begin)
    filled = np.concatenate([[0], np.cumsum(length)])
    following = np.searchsorted(filled, filled[:-1] + size, side="right") - 1
    leaps, piece = following.tolist(), 0
    first = []
    while piece < document.size:
        first.append(piece)
        piece = leaps[piece]
    packs = np.array([*first, document.size], dtype=np.int64)
    return _Pieces(document, begin, length, packs, filled[packs])


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Return the causal mask within documents: bool, shape (..., length, length), True where the row may attend.

    Padding attends to padding, so that no row of a softmax is empty.
    """
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    return same & torch.ones_like(same).tril()
