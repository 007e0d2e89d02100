"""Trees come back exactly as they were, from bytes that are always the same, and without running code."""

from __future__ import annotations

import enum
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import CaptureError, CorruptSnapshot
from elastic.snapshot.tree import Encoded, TensorRef, TensorValue, decode, encode, encode_text

keys = st.one_of(st.text(), st.integers(), st.none(), st.booleans(), st.tuples(st.integers(), st.text()), st.binary())
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([torch.float8_e4m3fn, torch.Size([2, 3]), torch.device("cuda:1"), 2**64, -(2**64)]),
    st.builds(TensorRef, st.text(), st.none() | st.tuples(st.integers(0, 9))),
    st.builds(TensorValue, st.just("float32"), st.just((1,)), st.binary(min_size=4, max_size=4)),
    st.sets(st.integers() | st.text()),
    st.frozensets(st.integers()),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.dictionaries(st.sampled_from(["$tensor", "$", "a.b", "a"]), inner),
        st.dictionaries(keys, inner).map(OrderedDict),
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    """Equal in value, type, order and sign of zero."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b


@settings(derandomize=True, deadline=None, max_examples=300)
@given(trees)
def test_a_tree_comes_back_exactly(tree: object) -> None:
    data = encode(tree)
    assert same(decode(data), tree)
    assert encode(decode(data)) == data


@pytest.mark.parametrize("bits", ["7ff0000000000001", "fff8000000000000", "7ff8000000000abc", "fff0000000000000"])
def test_a_float_that_is_no_number_keeps_its_bits(bits: str) -> None:
    value = struct.unpack(">d", bytes.fromhex(bits))[0]
    assert struct.pack(">d", decode(encode([value]))[0]).hex() == bits


def test_an_integer_of_any_size_comes_back() -> None:
    assert decode(encode({"n": 10**5000}))["n"] == 10**5000


def test_zero_keeps_its_sign() -> None:
    assert math.copysign(1, decode(encode(-0.0))) == -1


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5), np.int8(-3), np.bool_(True), np.float64(2.5), np.array([[1, 2]], np.uint16), np.zeros((0, 3)),
        np.array(3.0), np.array(["a", "bc"]), np.array([1 + 2j], np.complex64), np.datetime64("2020-01-01"),
    ],
)  # fmt: skip
def test_numpy_values_keep_type_dtype_and_shape(value: object) -> None:
    back = decode(encode({"v": value}))["v"]
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert np.array_equal(back, value)


def test_generator_states_come_back_exactly() -> None:
    assert decode(encode(random.getstate())) == random.getstate()
    state = np.random.get_state()
    back = decode(encode(state))
    assert all(np.array_equal(a, b) for a, b in zip(state, back))


def test_counters_of_schedulers_come_back_as_counters() -> None:
    back = decode(encode(Counter({30: 1, 80: 2})))
    assert type(back) is Counter
    assert back == Counter({30: 1, 80: 2})


def test_dots_in_keys_and_nesting_stay_apart() -> None:
    assert decode(encode([{"a.b": 1}, {"a": {"b": 1}}, {}, {1: "x"}, {"1": "x"}])) == [
        {"a.b": 1}, {"a": {"b": 1}}, {}, {1: "x"}, {"1": "x"},
    ]  # fmt: skip


def test_a_part_encoded_before_stands_for_itself() -> None:
    assert encode({"a": Encoded(encode_text([1, (2,)]))}) == encode({"a": [1, (2,)]})


class Colour(enum.Enum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"), (Colour.RED, "Colour"), (Pair(1, 2), "Pair"), (defaultdict(int), "defaultdict"),
        (len, "builtin"), (np.array([None]), "dtype object"), (torch.Generator(), "torch"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved_is_named_by_key_path_and_type(value: object, kind: str) -> None:
    with pytest.raises(CaptureError, match=rf"{kind}.*scheduler\['a'\]\[1\]\[\(2, 3\)\]"):
        encode({"a": [0, {(2, 3): value}]}, "scheduler")


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(CaptureError, match="holds itself"):
        encode(tree, "thing")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b'{"$spell": 1}', b'{"$array": ["|O", [1], "AAAA"]}', b'{"$dtype": "load"}', b'{"$int": "zz"}',
     b'{"$float": "00"}', b'{"$array": ["<f4", [9], ""]}'],
)  # fmt: skip
def test_bytes_that_are_no_tree_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptSnapshot):
        decode(data)


def test_the_text_is_plain_json() -> None:
    text = encode({"lr": 0.1, "betas": (0.9, 0.999), "w": TensorRef("model.w")})
    assert json.loads(text) == {"lr": 0.1, "betas": {"$tuple": [0.9, 0.999]}, "w": {"$tensor": "model.w"}}
