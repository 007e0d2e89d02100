"""Logical names: what a tensor is called, whoever wraps its module and whatever holds it. Pure.

Wrappers such as DDP, FSDP and ``torch.compile`` put a component of their own into every name below them; saving with
and loading without one must not change what a tensor is called, so those components are dropped wherever they stand.
Keys of plain state trees are escaped, so that ``{"a.b": t}`` and ``{"a": {"b": t}}`` have different names.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.errors import CaptureError

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Components that a wrapper adds to the names of what it wraps."""


def canonical(name: str) -> str:
    """``name`` without the components that wrappers add: ``module._orig_mod.layers.0.weight`` → ``layers.0.weight``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def check_distinct(names: Iterable[str], where: str) -> None:
    """Raise CaptureError if two tensors of ``where`` have one name (for example once wrapper prefixes are dropped)."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CaptureError(
                f"two tensors are called {name!r} once wrapper prefixes ({', '.join(sorted(WRAPPERS))}) are dropped "
                "and declared names are given",
                where,
                "rename one of the submodules, or declare other names",
            )
        seen.add(name)


def child(parent: str, key: object) -> str:
    """The name of what ``parent`` holds under ``key``: injective, also for keys that hold dots or are not strings."""
    if type(key) is str:
        return f"{parent}.{key.replace('%', '%25').replace('.', '%2E')}"
    return f"{parent}.%{repr(key).replace('%', '%25').replace('.', '%2E')}"


def listing(names: Iterable[str], most: int = 5) -> str:
    """The first ``most`` names and how many more there are, for a sentence."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
