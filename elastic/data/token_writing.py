"""Text into Parquet files of tokens that can be read without being loaded.

    OUT/tokens-00000.parquet ...   one row a document: `tokens` (binary, little-endian), `length` (in tokens), `name`
    OUT/tokens.json                tokenizer, vocabulary size, counts, digest of every file

The `tokens` column is written uncompressed, PLAIN, required, and as one page for each row group. So the values of a
row group lie on disk one behind the other, each after its length in 4 bytes, and end where the column chunk ends:
a reader can map them, and every other reader of Parquet still sees an ordinary file.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from elastic.errors import ConfigError, StorageError

__all__ = ["FORMAT", "SUMMARY", "TokenSummary", "digest_documents", "find_texts", "write_documents", "write_tokens"]

FORMAT = "elastic-tokens/1"
SUMMARY = "tokens.json"

_GROUP_BYTES = 64 << 20
_FILE_BYTES = 1 << 30
_LARGEST_DOCUMENT_BYTES = 1 << 30
_SCHEMA = pa.schema(
    [
        pa.field("tokens", pa.large_binary(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class TokenSummary:
    """What was written. ``files`` holds (name, documents, tokens, digest) of each; ``digest`` is of all of them."""

    format: str
    tokenizer: str
    vocabulary_size: int
    token_bytes: int
    end_token: int | None
    documents: int
    tokens: int
    digest: str
    files: tuple[tuple[str, int, int, str], ...]


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    name: str
    vocabulary_size: int
    encode: Callable[[str, bytes], npt.NDArray[Any]]


def write_tokens(
    inputs: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    glob: str = "**/*",
    tokenizer: str | Callable[[str], Sequence[int]] = "bytes",
    vocabulary_size: int | None = None,
    end_token: int | None = None,
) -> TokenSummary:
    """Make token files in ``out`` from text files, one document each, and from what ``glob`` finds in directories.

    Documents stand in the order of the inputs, within a directory sorted by path; hidden names are left out.
    ``out`` appears whole or not at all. See ``write_documents`` for the rest.

    Raises ConfigError for no input, a path that does not exist or cannot be read, and a glob that finds nothing.
    """
    paths = find_texts(inputs, glob)
    return write_documents(
        ((str(path), _bytes_of(path)) for path in paths),
        out,
        tokenizer=tokenizer,
        vocabulary_size=vocabulary_size,
        end_token=end_token,
    )


def write_documents(
    documents: Iterable[tuple[str, str | bytes]],
    out: str | os.PathLike[str],
    *,
    tokenizer: str | Callable[[str], Sequence[int]] = "bytes",
    vocabulary_size: int | None = None,
    end_token: int | None = None,
) -> TokenSummary:
    """Make token files in ``out`` from (name, text) pairs, one row each.

    ``tokenizer`` is "bytes" (a token is a byte, vocabulary 256), "package.module:function", or a function from a text
    to token ids; for a function ``vocabulary_size`` is needed, or an attribute of that name. ``end_token`` is put
    behind every document; default for "bytes": 0, a byte that text does not hold; for others none. A token takes 1, 2
    or 4 bytes, by the vocabulary.

    Raises ConfigError if ``out`` holds something or the tokenizer cannot be used; StorageError if writing fails.
    """
    chosen = _tokenizer(tokenizer, vocabulary_size)
    if end_token is None and chosen.name == "bytes":
        end_token = 0
    if end_token is not None and not 0 <= end_token < chosen.vocabulary_size:
        raise ConfigError(
            "end_token", end_token, f"must be a token of the vocabulary, 0 to {chosen.vocabulary_size - 1}"
        )
    target = Path(out)
    _check_free(target)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        writing = _Writing(partial, chosen, end_token)
        for name, text in documents:
            writing.add(name, text.encode() if isinstance(text, str) else text)
        summary = writing.finish()
        os.replace(partial, target)
    except OSError as error:
        raise StorageError(
            f"the token files could not be written ({error.strerror or error})",
            str(target),
            "free some space or choose another --out",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary


def find_texts(inputs: Iterable[str | os.PathLike[str]], glob: str = "**/*") -> list[Path]:
    """Return the files among ``inputs`` and those that ``glob`` finds in the directories among them, sorted.

    Raises ConfigError if there is no input, one does not exist, or a directory holds nothing that matches.
    """
    found: list[Path] = []
    for item in inputs:
        path = Path(item)
        if path.is_dir():
            inside = sorted(entry for entry in path.glob(glob) if entry.is_file() and not _hidden(entry, path))
            if not inside:
                raise ConfigError("input", str(path), f"no file in this directory matches the glob {glob!r}")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise ConfigError("input", str(path), "does not exist; give text files or directories")
    if not found:
        raise ConfigError("input", [], "give at least one text file or directory")
    return found


def digest_of_files(digests: list[str]) -> str:
    """Return the xxh3-128 of the files' digests, one behind the other."""
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())


def digest_documents(documents: Iterable[npt.NDArray[Any]]) -> str:
    """Return the xxh3-128 of the documents' tokens (little-endian), each after its length as 8 bytes."""
    hasher = xxhash.xxh3_128()
    for tokens in documents:
        hasher.update(len(tokens).to_bytes(8, "little"))
        hasher.update(tokens.tobytes())
    return hasher.hexdigest()


class _Writing:
    """One output directory on its way: row groups into files, files into the summary."""

    def __init__(self, directory: Path, tokenizer: _Tokenizer, end_token: int | None) -> None:
        self._directory, self._tokenizer, self._end_token = directory, tokenizer, end_token
        size = tokenizer.vocabulary_size
        self._dtype = np.dtype("<u1" if size <= 1 << 8 else "<u2" if size <= 1 << 16 else "<u4")
        self._rows: list[tuple[bytes, int, str]] = []
        self._group_bytes = self._file_bytes = 0
        self._writer: pq.ParquetWriter | None = None
        self._hasher = xxhash.xxh3_128()
        self._counts = [0, 0]
        self._files: list[tuple[str, int, int, str]] = []

    def add(self, name: str, text: bytes) -> None:
        ids = self._tokenizer.encode(name, text)
        if self._end_token is not None:
            ids = np.append(ids, self._end_token)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._tokenizer.vocabulary_size:
            raise ConfigError(
                "vocabulary_size", self._tokenizer.vocabulary_size, f"the tokenizer gave ids beyond it for {name}"
            )
        tokens = ids.astype(self._dtype).tobytes()
        if len(tokens) > _LARGEST_DOCUMENT_BYTES:
            raise ConfigError("input", name, f"one document of {len(tokens)} bytes; split it into parts below 1 GiB")
        self._hasher.update(int(ids.size).to_bytes(8, "little"))
        self._hasher.update(tokens)
        self._rows.append((tokens, int(ids.size), name))
        self._group_bytes += len(tokens)
        if self._group_bytes >= _GROUP_BYTES:
            self._write_group()
            if self._file_bytes >= _FILE_BYTES:
                self._close_file()

    def finish(self) -> TokenSummary:
        if not self._files and not self._rows and self._writer is None:
            raise ConfigError("documents", [], "there is none; give at least one text")
        self._write_group()
        self._close_file()
        summary = TokenSummary(
            format=FORMAT,
            documents=sum(documents for _, documents, _, _ in self._files),
            tokens=sum(tokens for _, _, tokens, _ in self._files),
            digest=digest_of_files([digest for *_, digest in self._files]),
            files=tuple(self._files),
            **self._vocabulary(),
        )
        (self._directory / SUMMARY).write_text(json.dumps(asdict(summary), indent=1) + "\n")
        return summary

    def _vocabulary(self) -> dict[str, Any]:
        return {
            "tokenizer": self._tokenizer.name,
            "vocabulary_size": self._tokenizer.vocabulary_size,
            "token_bytes": self._dtype.itemsize,
            "end_token": self._end_token,
        }

    def _write_group(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._directory / f"tokens-{len(self._files):05d}.parquet",
                _SCHEMA,
                compression="none",
                use_dictionary=False,
                write_statistics=False,
                data_page_size=(1 << 31) - 1,
                max_rows_per_page=(1 << 31) - 1,
            )
        by_column = zip(*self._rows, strict=True)
        columns = [pa.array(values, field.type) for values, field in zip(by_column, _SCHEMA, strict=True)]
        self._writer.write_table(pa.table(columns, schema=_SCHEMA), row_group_size=len(self._rows))
        self._counts[0] += len(self._rows)
        self._counts[1] += sum(length for _, length, _ in self._rows)
        self._file_bytes += self._group_bytes
        self._rows, self._group_bytes = [], 0

    def _close_file(self) -> None:
        if self._writer is None:
            return
        documents, tokens = self._counts
        digest = self._hasher.hexdigest()
        about = {"format": FORMAT, "documents": documents, "tokens": tokens, "digest": digest, **self._vocabulary()}
        self._writer.add_key_value_metadata({"elastic.tokens": json.dumps(about)})
        self._writer.close()
        self._files.append((f"tokens-{len(self._files):05d}.parquet", documents, tokens, digest))
        self._writer, self._hasher, self._counts, self._file_bytes = None, xxhash.xxh3_128(), [0, 0], 0


def _tokenizer(tokenizer: str | Callable[[str], Sequence[int]], vocabulary_size: int | None) -> _Tokenizer:
    if tokenizer == "bytes":
        return _Tokenizer("bytes", 256, lambda _, text: np.frombuffer(text, dtype=np.uint8))
    name, function = tokenizer, tokenizer
    if isinstance(tokenizer, str):
        module, _, attribute = tokenizer.partition(":")
        if not module or not attribute:
            raise ConfigError("tokenizer", tokenizer, 'give "bytes" or "package.module:function"')
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError("tokenizer", tokenizer, f"cannot be imported ({error})") from error
    else:
        name = f"{getattr(tokenizer, '__module__', '')}:{getattr(tokenizer, '__qualname__', type(tokenizer).__name__)}"
    if not callable(function):
        raise ConfigError("tokenizer", name, "is not a function from a text to token ids")
    size = vocabulary_size or getattr(function, "vocabulary_size", None)
    if not isinstance(size, int) or not 1 <= size <= 1 << 32:
        raise ConfigError("vocabulary_size", size, f"say how many tokens {name} knows")
    encode_text: Callable[[str], Sequence[int]] = function

    def encode(document: str, text: bytes) -> npt.NDArray[Any]:
        try:
            return np.asarray(encode_text(text.decode()), dtype=np.int64)
        except UnicodeDecodeError as error:
            raise ConfigError("input", document, f'is not UTF-8 ({error.reason}); use the tokenizer "bytes"') from error

    return _Tokenizer(str(name), size, encode)


def _check_free(target: Path) -> None:
    if target.is_dir():
        if any(target.iterdir()):
            raise ConfigError("out", str(target), "is not empty; choose another directory or delete it first")
    elif target.exists():
        raise ConfigError("out", str(target), "is a file; choose a directory")


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError("input", str(path), f"cannot be read ({error.strerror})") from error


def _hidden(entry: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in entry.relative_to(root).parts)
