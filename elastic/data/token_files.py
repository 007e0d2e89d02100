"""Token files, read through the page cache, and fixed-length windows over them.

What is mapped: each Parquet file as a whole. The tokens themselves are read straight from the map, at the places that
the layout of ``token_writing`` gives; nothing is decoded and nothing is kept but what a read copies out. In memory are
16 bytes a document, for where it begins in the stream and in its file.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from elastic.data.order import Ids
from elastic.data.token_writing import (
    FORMAT,
    SUMMARY,
    TokenSummary,
    digest_documents,
    digest_of_files,
    write_documents,
    write_tokens,
)
from elastic.errors import ConfigError

__all__ = ["TokenDataset", "TokenFiles", "TokenSummary", "write_documents", "write_tokens"]


class TokenFiles:
    """All documents of a directory (or file) of tokens, as one stream: document after document, in their order.

    ``tokens``, ``documents``: counts. ``offsets``: int64 array, document ``d`` is the stream from ``offsets[d]`` to
    ``offsets[d + 1]``. ``lengths``: tokens of each document. ``tokenizer``, ``vocabulary_size``, ``end_token``,
    ``dtype``, ``digest``: as written.

    Raises ConfigError if the path holds no token files, or some that are incomplete or were not made by
    ``elastic tokens``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        paths, about = _listed(self.path)
        self.tokenizer = str(about["tokenizer"])
        self.vocabulary_size = int(about["vocabulary_size"])
        self.end_token: int | None = about["end_token"]
        self.digest = str(about["digest"])
        self.dtype = np.dtype(f"<u{int(about['token_bytes'])}")
        self._paths = paths
        parts = [_FilePart(path, self.dtype.itemsize) for path in paths]
        self.lengths: Ids = np.concatenate([part.lengths for part in parts])
        self.offsets: Ids = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self._places: Ids = np.concatenate([part.places for part in parts])
        self._first_document = np.cumsum([0, *(part.lengths.size for part in parts)])
        self.documents, self.tokens = self.lengths.size, int(self.offsets[-1])
        if (self.documents, self.tokens) != (about["documents"], about["tokens"]):
            raise ConfigError(
                "path",
                str(self.path),
                f"holds {self.documents} documents and {self.tokens} tokens, {SUMMARY} says {about['documents']} and "
                f"{about['tokens']}; write the token files again",
            )
        self._maps: list[npt.NDArray[np.uint8]] | None = None

    def document(self, number: int) -> npt.NDArray[Any]:
        """Return the tokens of one document, copied, in the dtype of the files."""
        return self.read(int(self.offsets[number]), int(self.offsets[number + 1]))

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the tokens of the stream from ``start`` to ``stop``, copied, in the dtype of the files."""
        tokens = np.empty(stop - start, dtype=self.dtype)
        width = self.dtype.itemsize
        document = int(np.searchsorted(self.offsets, start, side="right")) - 1
        position = start
        while position < stop:
            begin = int(self.offsets[document])
            end = min(stop, int(self.offsets[document + 1]))
            if end > position:
                place = int(self._places[document]) + (position - begin) * width
                piece = self._map_of(document)[place : place + (end - position) * width]
                tokens[position - start : end - start] = piece.view(self.dtype)
                position = end
            document += 1
        return tokens

    def verify(self) -> bool:
        """Read every token and return whether all of them are what was written."""
        digests = []
        for first, last in zip(self._first_document[:-1], self._first_document[1:], strict=True):
            digests.append(digest_documents(self.document(number) for number in range(first, last)))
        return self.digest == (digests[0] if self.path.is_file() else digest_of_files(digests))

    def _map_of(self, document: int) -> npt.NDArray[np.uint8]:
        if self._maps is None:
            self._maps = [_mapped(path) for path in self._paths]
        if len(self._maps) == 1:
            return self._maps[0]
        return self._maps[int(np.searchsorted(self._first_document, document, side="right")) - 1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}


class TokenDataset:
    """Windows of ``sequence_length`` tokens over the stream of all documents, for next-token prediction.

    Item ``i`` is ``(x, y)``, int64 tensors of shape (sequence_length,): ``x`` the tokens from ``i * sequence_length``
    on, ``y`` the same one token later. Every token but the very first is a target in exactly one window, except for
    the less than ``sequence_length`` at the end that fill none. Windows run across documents (see ``PackedDataset``).

    Raises ConfigError if the files hold less than one window.
    """

    def __init__(self, path: str | os.PathLike[str] | TokenFiles, sequence_length: int) -> None:
        if sequence_length < 1:
            raise ConfigError("sequence_length", sequence_length, "must be at least 1 token")
        self.files = path if isinstance(path, TokenFiles) else TokenFiles(path)
        self.sequence_length = self.tokens_per_sample = sequence_length
        self.vocabulary_size = self.files.vocabulary_size
        self._length = max(0, self.files.tokens - 1) // sequence_length
        if not self._length:
            raise ConfigError(
                "sequence_length",
                sequence_length,
                f"{self.files.path} holds {self.files.tokens} tokens, a window takes {sequence_length + 1}; "
                "shorten it or add text",
            )

    @property
    def fingerprint(self) -> str:
        return f"tokens:{self.files.digest}:{self.sequence_length}"

    def token_count(self, ids: Ids) -> int:
        """Return how many tokens these windows predict."""
        return len(ids) * self.sequence_length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        start = index * self.sequence_length
        tokens = torch.from_numpy(self.files.read(start, start + self.sequence_length + 1).astype(np.int64))
        return tokens[:-1], tokens[1:]


class _FilePart:
    """Where the documents of one file begin in it (bytes), and how many tokens each has."""

    def __init__(self, path: Path, token_bytes: int) -> None:
        try:
            file = pq.ParquetFile(path, memory_map=True)
            column = file.schema_arrow.get_field_index("tokens")
            self.lengths: Ids = file.read(columns=["length"]).column(0).to_numpy().astype(np.int64)
        except (OSError, pa.ArrowException, KeyError, IndexError) as error:
            raise ConfigError("path", str(path), f"cannot be read as a Parquet file of tokens ({error})") from error
        places, done = [], 0
        data = _mapped(path)
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            chunk = group.column(column)
            lengths = self.lengths[done : done + group.num_rows] * token_bytes
            done += group.num_rows
            # The values end where the chunk ends; before them is only the header of the one page, a few dozen bytes.
            end = chunk.data_page_offset + chunk.total_compressed_size
            begin = end - int(lengths.sum()) - 4 * lengths.size
            starts = begin + 4 * np.arange(1, lengths.size + 1) + np.concatenate([[0], np.cumsum(lengths)[:-1]])
            ends_meet = all(
                int.from_bytes(data[starts[row] - 4 : starts[row]].tobytes(), "little") == lengths[row]
                for row in (0, lengths.size // 2, lengths.size - 1)
            )
            plain = chunk.compression == "UNCOMPRESSED" and not chunk.has_dictionary_page
            if not plain or not 0 < begin - chunk.data_page_offset < 256 or not ends_meet:
                raise ConfigError(
                    "path", str(path), "its layout cannot be mapped; make the token files anew with `elastic tokens`"
                )
            places.append(starts)
        self.places: Ids = np.concatenate(places).astype(np.int64) if places else np.empty(0, dtype=np.int64)


def _listed(path: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the files and what was written about them."""
    if path.is_file():
        try:
            metadata = pq.read_metadata(path).metadata or {}
            about = json.loads(metadata[b"elastic.tokens"])
        except (OSError, pa.ArrowException, KeyError, ValueError) as error:
            raise ConfigError("path", str(path), "is not a token file that `elastic tokens` has made") from error
        paths = [path]
    else:
        try:
            about = json.loads((path / SUMMARY).read_text())
            paths = [path / str(name) for name, *_ in about["files"]]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "path", str(path), f"holds no readable {SUMMARY}; make the token files with `elastic tokens`"
            ) from error
    if about.get("format") != FORMAT:
        raise ConfigError("path", str(path), f"is in the format {about.get('format')!r}, this release reads {FORMAT!r}")
    return paths, about


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
