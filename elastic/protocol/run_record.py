"""The part of a run's state that no living process could tell a new controller: as JSON, for the journal. Pure.

What ranks, stores and durable storage know themselves is asked of them (see ``adoption``) and is not written here. A
field that is added to ``RunState`` is written unless it is named below.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

from elastic.protocol.run_state import Limits, RunState

ASKED_OF_THE_LIVING = frozenset(
    {
        "limits", "entered", "at_end", "departures", "node_snapshots", "round_open", "round_cancelled",
        "first_round_due", "round_failures", "salvage", "nodes_lost", "deadlines", "ending",
    }
)  # fmt: skip


def record_of(state: RunState) -> dict[str, Any]:
    """What has to be known of ``state`` to go on with it; JSON-able."""
    return {f.name: to_plain(getattr(state, f.name)) for f in fields(state) if f.name not in ASKED_OF_THE_LIVING}


def state_of(record: Mapping[str, Any], limits: Limits, shift_s: float = 0.0) -> RunState:
    """The state that ``record`` was made of, without what is asked of the living. ``shift_s`` is added to its times:
    its clock may have been another host's."""
    hints = _hints(RunState)
    known = {name: from_plain(hints[name], value) for name, value in record.items() if name in hints}
    state = RunState(limits, **known)
    return replace(
        state,
        incident=_shifted(state.incident, shift_s),
        evacuation=_shifted(state.evacuation, shift_s),
        notices=tuple(_shifted(notice, shift_s) for notice in state.notices),
        progress_at=state.progress_at + shift_s,
        node_failures=tuple((at + shift_s, node) for at, node in state.node_failures),
    )


def _shifted(story: Any, shift_s: float) -> Any:
    """``story`` with its moments (``at``, ``deadline``, ``..._at``) moved; -1 stands for what has not happened."""
    if story is None:
        return None
    names = [f.name for f in fields(story) if f.name in ("at", "deadline") or f.name.endswith("_at")]
    marks = {name: getattr(story, name) for name in names}
    return replace(story, **{name: at + shift_s for name, at in marks.items() if at >= 0})


def to_plain(value: Any) -> Any:
    """``value`` of dataclasses, mappings, tuples and sets as what JSON has."""
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (frozenset, set)):
        return sorted(to_plain(item) for item in value)
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def from_plain(kind: Any, value: Any) -> Any:
    """Inverse of ``to_plain`` for a value of the annotated type ``kind``."""
    if value is None:
        return None
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return from_plain(next(option for option in inner if option is not type(None)), value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: from_plain(hints[name], item) for name, item in value.items() if name in hints})
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {inner[0](key): from_plain(inner[1], item) for key, item in value.items()}
    if origin is frozenset:
        return frozenset(from_plain(inner[0], item) for item in value)
    if origin is tuple and inner[-1] is Ellipsis:
        return tuple(from_plain(inner[0], item) for item in value)
    if origin is tuple:
        return tuple(from_plain(of, item) for of, item in zip(inner, value))
    if kind is float:
        return float(value)
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
