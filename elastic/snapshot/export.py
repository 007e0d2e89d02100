"""What of a snapshot leaves it, under which names, and the directory that it goes to."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic.errors import ConfigError, StorageError
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.layout import TensorSpec
from elastic.snapshot.names import listing

MODEL = "model"


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A tensor by its name in the export; ``path`` is the same as keys of nested dicts. ``spec`` is the saved one."""

    name: str
    path: tuple[str, ...]
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Export:
    """``ties`` are pairs (other name, name of the exported tensor). ``left_out`` counts tensors that were not asked
    for; values that are no tensors never leave."""

    tensors: tuple[ExportedTensor, ...]
    ties: tuple[tuple[ExportedTensor, str], ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written: files relative to ``directory``."""

    directory: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    left_out: int
    notes: tuple[str, ...] = ()


def choose(index: SnapshotIndex, names: str = "", model_only: bool = False) -> Export:
    """The tensors whose name begins with ``names``; with ``model_only`` those of modules, under the names that the
    module itself gives them, if there is one module. Raises ConfigError if that leaves nothing."""
    models = model_components(index)
    if model_only and not models:
        raise ConfigError("--model-only", True, "this snapshot does not say which of its tensors are a model's")
    strip = len(models) == 1 and model_only

    def exported(name: str, spec: TensorSpec) -> ExportedTensor | None:
        owner, _, rest = name.partition(".")
        if not name.startswith(names) or (model_only and owner not in models):
            return None
        return ExportedTensor(rest, (rest,), spec) if strip else ExportedTensor(name, (owner, rest), spec)

    specs = {spec.name: spec for spec in index.table.specs}
    tensors = {name: found for name, spec in specs.items() if (found := exported(name, spec)) is not None}
    ties: list[tuple[ExportedTensor, str]] = []
    for alias, name in index.table.aliases:
        if (other := exported(alias, specs[name])) is None:
            continue
        if name in tensors:
            ties.append((other, tensors[name].name))
        else:  # what it is tied to stays behind, so it takes the data along
            tensors[name] = other
    if not tensors:
        owners = sorted({name.partition(".")[0] for name in specs})
        raise ConfigError("--names", names, f"no tensor's name begins so; there are {listing(owners)}")
    return Export(tuple(tensors.values()), tuple(ties), len(specs) - len(tensors))


def model_components(index: SnapshotIndex) -> set[str]:
    """Names under which modules were attached."""
    trees = (json.loads(tree) for tree in index.objects.trees.values())
    components = [tree.get("components") for tree in trees if isinstance(tree, dict)]
    return {
        name
        for found in components
        if isinstance(found, dict)
        for name, tree in found.items()
        if isinstance(tree, dict) and tree.get("kind") == MODEL
    }


@contextlib.contextmanager
def new_directory(out: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty directory to write into; what an error interrupts leaves nothing behind.

    Raises ConfigError if it holds something, StorageError if it cannot be written.
    """
    path = Path(out).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError("--out", str(out), "it holds something already; name a directory that is new or empty")
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield path
    except BaseException as error:
        with contextlib.suppress(OSError):
            for entry in path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            if made:
                path.rmdir()
        if isinstance(error, OSError):
            what = f"the export cannot be written: {error.strerror or error}"
            raise StorageError(what, str(path), "free space, or name another place") from error
        raise
