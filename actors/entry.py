"""What the ranks call: a function object, or a name that each rank imports for itself.

A script's function is named, not pickled: each rank loads the file, so that what it defines is defined once a process
and the file on the rank's node is what runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """``target`` is ``path/script.py:function`` or ``package.module:function``; ``function`` wins where it is given."""

    target: str = ""
    function: Callable[..., Any] | None = None

    def load(self) -> Callable[..., Any]:
        """The function. Raises ConfigError if there is none of that name."""
        if self.function is not None:
            return self.function
        return load_function(self.target)


def load_function(target: str) -> Callable[..., Any]:
    """The function that ``SCRIPT.py:function`` or ``package.module:function`` names. Raises ConfigError."""
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise ConfigError("SCRIPT", target, "name a function, as SCRIPT.py:function or package.module:function")
    module = _load_file(place, target) if place.endswith(".py") else _import(place, target)
    function = getattr(module, name, None)
    if not callable(function):
        have = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_") and _own(v, module))
        raise ConfigError("SCRIPT", target, f"there is no function {name!r} there; it has {', '.join(have) or 'none'}")
    return function


def _own(value: Any, module: Any) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def _load_file(path: str, target: str) -> Any:
    if not os.path.isfile(path):
        raise ConfigError("SCRIPT", target, f"there is no file {path!r} in {os.getcwd()!r}")
    full = os.path.abspath(path)
    name = os.path.splitext(os.path.basename(full))[0]
    loaded = sys.modules.get(name)
    if loaded is not None and os.path.abspath(getattr(loaded, "__file__", "") or "") == full:
        return loaded
    if os.path.dirname(full) not in sys.path:
        sys.path.insert(0, os.path.dirname(full))
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise ConfigError("SCRIPT", target, f"{path!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(name: str, target: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError("SCRIPT", target, f"there is no module {error.name!r} on the path of Python") from None
        raise
