"""Turns a hidden sibling package into a sentence with the cure.

``actors`` and ``policies`` are top-level packages of ours with plain names. A folder of the user's with the same name,
earlier on the path, hides them; the import error that follows would name a module that the user never heard of.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

import elastic
from elastic.errors import ConfigError


def sibling(name: str) -> ModuleType:
    """Import ``name`` (``actors.x`` or ``policies.x``). Raises ConfigError if another package hides ours."""
    top = import_module(name.partition(".")[0])
    ours = os.path.dirname(os.path.dirname(os.path.abspath(elastic.__file__)))
    found = [os.path.dirname(os.path.abspath(path)) for path in getattr(top, "__path__", [])]
    if ours not in found:
        raise ConfigError(
            "import",
            top.__name__,
            f"the folder {(found or ['?'])[0]}/{top.__name__} hides the package of that name that ray-elastic brings; "
            "rename it, or start Python from another directory",
        )
    return import_module(name)
