"""What ``elastic run`` was asked for: the flags over the file over the defaults. Pure.

The file is YAML or TOML and has the names of the API:

    train_loop: train.py:train            (or the argument of the command)
    train_loop_config: {lr: 1e-3}
    scaling_config: {num_workers: [2, 8], resources_per_worker: {CPU: 1}, mesh: {dp: -1}}
    run_config: {name: gpt, storage_path: s3://bucket/runs, snapshots: {interval: auto}, failures: {}, seed: 0}
    address: head:6379
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.config import RunConfig, ScalingConfig
from elastic.errors import ConfigError

_SECTIONS = ("train_loop", "train_loop_config", "scaling_config", "run_config", "address")
_WORKERS = re.compile(r"(\d+)(?:\s*[:-]\s*(\d+))?")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+")

DEFAULT_STORAGE = "elastic-runs"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A run, ready to be launched."""

    target: str
    train_loop_config: Any
    scaling: ScalingConfig
    run: RunConfig
    address: str = ""


def read_file(path: Path) -> dict[str, Any]:
    """The sections of a config file. Raises ConfigError: not there, not readable, an unknown section."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("--config", str(path), f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError("--config", str(path), "is not a text file; use YAML or TOML") from None
    value = _toml(text, path) if path.suffix == ".toml" else _yaml(text, path)
    if not isinstance(value, dict):
        raise ConfigError("--config", str(path), f"must hold {', '.join(_SECTIONS)}")
    for name, section in value.items():
        if name not in _SECTIONS:
            raise ConfigError("--config", name, f"{path} has no such section; it may have {', '.join(_SECTIONS)}")
        if name.endswith("_config") and not isinstance(section, dict):
            raise ConfigError(f"--config {name}", section, "must be a mapping of names to values")
    return value


def _toml(text: str, path: Path) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("--config", str(path), f"is not TOML: {error}") from None


def _yaml(text: str, path: Path) -> Any:
    import yaml

    try:
        return yaml.load(text, _loader())
    except yaml.YAMLError as error:
        raise ConfigError("--config", str(path), f"is not YAML: {' '.join(str(error).split())}") from None


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.1 takes ``1e-3`` for a text; a learning rate is a number."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
    return Loader


def workers_of(text: str) -> int | tuple[int, int]:
    """``4``, ``2:8`` or ``2-8``."""
    match = _WORKERS.fullmatch(text.strip())
    if match is None:
        raise ConfigError("--workers", text, "use a number, or MIN:MAX")
    low = int(match[1])
    return low if match[2] is None else (low, int(match[2]))


def pairs_of(text: str, flag: str, convert: type) -> dict[str, Any]:
    """``CPU=1,GPU=0.5`` or ``dp=-1,tp=2``."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = (piece.strip() for piece in part.partition("="))
        try:
            found[name] = convert(value)
        except ValueError:
            separator = ""
        if not separator or not name:
            example = "CPU=1,GPU=1" if convert is float else "dp=-1,tp=2"
            raise ConfigError(flag, text, f"use NAME=NUMBER, with commas between, as {example}")
    return found


def assignment_of(text: str) -> tuple[list[str], Any]:
    """``optimizer.lr=1e-3`` as its path and value; the value is read as in the file."""
    name, separator, value = text.partition("=")
    path = name.strip().split(".")
    if not separator or not all(path):
        raise ConfigError("--set", text, "use KEY=VALUE; dots lead into nested mappings")
    try:
        return path, json.loads(value)
    except ValueError:
        return path, _yaml(value, Path("--set"))


def settings_from(
    target: str | None,
    file: Mapping[str, Any],
    *,
    workers: str | None = None,
    storage: str | None = None,
    name: str | None = None,
    resources: str | None = None,
    hot_spares: int | None = None,
    mesh: Sequence[str] = (),
    interval: str | None = None,
    replicas: int | None = None,
    keep: str | None = None,
    seed: int | None = None,
    restore: str | None = None,
    start_from: str | None = None,
    accept: Sequence[str] = (),
    gpu: bool = False,
    assignments: Sequence[str] = (),
    address: str | None = None,
) -> RunSettings:
    """Flags beat the file, the file beats the defaults. Raises ConfigError for what cannot be used."""
    target = target or file.get("train_loop")
    if not target:
        raise ConfigError("SCRIPT", None, "name the train function, as SCRIPT.py:function or package.module:function")
    scaling = dict(file.get("scaling_config", {}))
    if isinstance(scaling.get("num_workers"), str):
        scaling["num_workers"] = workers_of(scaling["num_workers"])
    elif isinstance(scaling.get("num_workers"), list):
        scaling["num_workers"] = tuple(scaling["num_workers"])
    if workers is not None:
        scaling["num_workers"] = workers_of(workers)
    if resources is not None:
        scaling["resources_per_worker"] = pairs_of(resources, "--resources", float)
    if hot_spares is not None:
        scaling["hot_spares"] = hot_spares
    if mesh:
        allowed = [pairs_of(text, "--mesh", int) for text in mesh]
        scaling["mesh"] = allowed[0] if len(allowed) == 1 else allowed
    if gpu:
        scaling["use_gpu"] = True

    run = dict(file.get("run_config", {}))
    snapshots = dict(run.pop("snapshots", {}))
    given = {"interval": interval, "replicas": replicas, "keep": keep}
    snapshots |= {field: value for field, value in given.items() if value is not None}
    address = address if address is not None else file.get("address") or ""
    run["snapshots"] = snapshots
    if seed is not None:
        run["seed"] = seed
    if start_from is not None:
        run["start_from"] = start_from
    if restore is not None or accept:
        before = run.get("restore", {})
        how = {"mode": before} if isinstance(before, str) else dict(before)
        how |= {"mode": restore} if restore is not None else {}
        how |= {"accept_versions": tuple(accept)} if accept else {}
        run["restore"] = how
    run["name"] = name or run.get("name") or default_name(target)
    chosen = storage or run.get("storage_path")
    if chosen is None and address:
        raise ConfigError("--storage", None, "name storage that every node of the cluster reaches: s3://BUCKET/PREFIX")
    run["storage_path"] = absolute(str(chosen or DEFAULT_STORAGE))

    return RunSettings(
        target, train_config(file, assignments), ScalingConfig(**scaling), RunConfig(**run), str(address)
    )


def train_config(file: Mapping[str, Any], assignments: Sequence[str]) -> Any:
    """The argument of the train function: the file's section, with the assignments in it; None where there is none."""
    if "train_loop_config" not in file and not assignments:
        return None
    config = json_like(file.get("train_loop_config", {}))
    for text in assignments:
        path, value = assignment_of(text)
        place = config
        for key in path[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError("--set", text, f"{key!r} is not a mapping")
        place[path[-1]] = value
    return config


def json_like(value: Any) -> Any:
    """A copy that may be changed."""
    return {key: json_like(item) for key, item in value.items()} if isinstance(value, dict) else value


def default_name(target: str) -> str:
    """The run's name where none is given: that of the script or module."""
    place = target.rpartition(":")[0]
    stem = os.path.splitext(os.path.basename(place))[0] if place.endswith(".py") else place.rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-") or "run"


def absolute(storage: str) -> str:
    """A local path made absolute: ranks stand in other directories."""
    if "://" in storage or not storage.strip():
        return storage
    return os.path.abspath(os.path.expanduser(storage))
