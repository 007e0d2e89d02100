"""A pickle is read as data: what it would build is told, and nothing of it happens."""

from __future__ import annotations

import enum
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import CorruptSnapshot
from elastic.snapshot.inert_pickle import Record, Symbol, read_pickle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=20,
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_values_come_out_as_they_went_in(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), "x") == value


@dataclass(frozen=True)
class Point:
    x: int
    y: tuple[int, ...]


class Colour(enum.Enum):
    RED = 3


class Boom:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_an_old_protocol_is_read_too() -> None:
    value = {"a": [1, 2.5, None, True, "é"], "b": (1 << 40, ())}
    assert read_pickle(pickle.dumps(value, 2), "x") == value


def test_an_object_is_told_by_class_arguments_and_state() -> None:
    shared = Point(1, (2, 3))
    found = read_pickle(pickle.dumps([shared, shared, Colour.RED, OrderedDict(a=1)], 4), "x")
    first, second, colour, ordered = found
    assert isinstance(first, Record)
    assert first is second
    assert first.symbol == Symbol(Point.__module__, "Point")
    assert (first.get("x"), first.get("y"), first.get("z")) == (1, (2, 3), None)
    assert (colour.symbol.name, colour.arguments) == ("Colour", (3,))
    assert (ordered.symbol.name, ordered.items) == ("OrderedDict", [("a", 1)])


def test_a_call_is_told_and_not_made(tmp_path: Path) -> None:
    found = read_pickle(pickle.dumps(Boom(tmp_path / "boomed"), 4), "x")
    assert found.symbol.name == "open"
    assert not (tmp_path / "boomed").exists()


@pytest.mark.parametrize(
    "data",
    [b"", b"no pickle", b"\x80\x04.", b"\x80\x04]", b"\x80\x04u.", b"\x80\x04h\x07.", b"\x80\x04NNb.", b"Pid\n."],
)
def test_what_is_no_pickle_of_data_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptSnapshot, match="x"):
        read_pickle(data, "x")
