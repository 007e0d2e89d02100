"""The versions of this process: its code, container and dependencies, for the manifest and for a restore."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import elastic

PACKAGES = (
    "numpy",
    "triton",
    "torchvision",
    "torchaudio",
    "torchdata",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "flash-attn",
    "transformer-engine",
    "xformers",
    "apex",
    "bitsandbytes",
    "deepspeed",
    "megatron-core",
)
"""Distributions that decide what a training step computes; those that are installed are the dependencies."""

GIT_TIMEOUT_S = 5.0


def installed() -> dict[str, str]:
    """Versions of what is installed where this process runs: torch, python, elastic, dependencies, container."""
    return {
        "torch": _distribution("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "elastic": elastic.__version__,
        "dependencies": ", ".join(f"{name} {found}" for name in PACKAGES if (found := _distribution(name))),
        "container": _container(),
    }


def of_objects(tree: bytes) -> dict[str, str]:
    """What a rank's objects tell of themselves: the fingerprint of the loader's dataset, the kinds of the optimizers.

    Read as plain JSON, so that a process without torch can."""
    found = {"data": "", "optimizer": ""}
    kinds = []
    for component in json.loads(tree).get("components", {}).values():
        if component.get("kind") == "optimizer" and "class" in component:
            kinds.append(str(component["class"]))
        elif component.get("kind") == "loader" and isinstance(component.get("state"), dict):
            found["data"] = str(component["state"].get("fingerprint", ""))
    return {**found, "optimizer": ", ".join(kinds)}


def code_of(function: Callable[..., Any]) -> dict[str, str]:
    """The version of the code of a train function: ``code`` is a digest of the source of the module that holds it,
    ``commit`` the git commit that its file lies in, with ``+`` where the work tree has changes. Empty where unknown."""
    function = inspect.unwrap(function)
    try:
        file = inspect.getsourcefile(function)
    except TypeError:  # a builtin, or a callable object
        return {"code": "", "commit": ""}
    if file is None or not os.path.isfile(file):
        try:
            return {"code": _digest(inspect.getsource(function).encode()), "commit": ""}
        except (OSError, TypeError):
            return {"code": "", "commit": ""}
    return {"code": f"{os.path.basename(file)} {_digest(Path(file).read_bytes())}", "commit": _commit(file)}


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:12]


def _commit(file: str) -> str:
    directory = os.path.dirname(os.path.abspath(file))
    commit = _git(directory, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return ""
    return commit + ("+" if _git(directory, "status", "--porcelain", "--untracked-files=no") else "")


def _git(directory: str, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", directory, *words], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _distribution(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _container() -> str:
    """The image that this process runs in, where it is told: CONTAINER_IMAGE, or the note that podman leaves."""
    if image := os.environ.get("CONTAINER_IMAGE"):
        return image
    try:
        note = Path("/run/.containerenv").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    match = re.search(r'^image="([^"]+)"', note, re.MULTILINE)
    return match[1] if match else ""
