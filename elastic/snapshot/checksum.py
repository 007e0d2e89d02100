"""The checksums of chunks and files, recorded by name. A name that is not known here is refused, never skipped.

A digest is written as ``algorithm:hex``. xxh3_128 finds damage at memory speed; blake3 and sha256 also resist an
adversary who can choose bytes, at 4 and 20 times the cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from elastic.errors import ConfigError, CorruptSnapshot
from elastic.storage.blob_store import Buffer

DEFAULT_ALGORITHM = "xxh3_128"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One checksum: its name in tables, bytes of a digest, and the function of a whole buffer."""

    name: str
    digest_bytes: int
    digest: Callable[[Buffer], bytes]


def _blake3(data: Buffer) -> bytes:
    from blake3 import blake3

    return bytes(blake3(data).digest())


_ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("xxh3_128", 16, xxhash.xxh3_128_digest),
        Algorithm("blake3", 32, _blake3),
        Algorithm("sha256", 32, lambda data: hashlib.sha256(data).digest()),
    )
}


def algorithm_named(name: str) -> Algorithm:
    """The checksum a snapshot was written with. Raises CorruptSnapshot for a name that this version does not know."""
    try:
        return _ALGORITHMS[name]
    except KeyError:
        known = ", ".join(_ALGORITHMS)
        cure = f"this version knows {known}; install a newer one"
        raise CorruptSnapshot(f"unknown checksum {name!r}", "", cure) from None


def check_algorithm(name: str) -> Algorithm:
    """The checksum to write with. Raises ConfigError if it is unknown or its package is missing."""
    if name not in _ALGORITHMS:
        raise ConfigError("checksum", name, f"use one of {', '.join(_ALGORITHMS)}")
    try:
        _ALGORITHMS[name].digest(b"")
    except ImportError:
        raise ConfigError("checksum", name, f"install the package: pip install {name}") from None
    return _ALGORITHMS[name]


def digest_text(name: str, data: Buffer) -> str:
    """``algorithm:hex`` of a whole file."""
    return f"{name}:{algorithm_named(name).digest(data).hex()}"


def check_digest(text: str, data: Buffer, where: str) -> None:
    """Raise CorruptSnapshot unless ``data`` has the digest ``text`` (``algorithm:hex``). No digest is no match."""
    name, _, wanted = text.partition(":")
    if not wanted or algorithm_named(name).digest(data).hex() != wanted:
        raise CorruptSnapshot("the file does not have its recorded checksum", where, "restore from an older snapshot")
