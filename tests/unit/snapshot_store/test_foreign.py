"""Which tensors of a foreign file are the weights, and what they are then called."""

from __future__ import annotations

import pytest

from elastic.errors import ConfigError
from elastic.snapshot.foreign import Foreign, ForeignTensor, weights_of


def tensor(*path: str, tied_to: tuple[str, ...] = ()) -> ForeignTensor:
    return ForeignTensor(path, "float32", (), 4, (), tied_to)


def names(part: str | None, *tensors: ForeignTensor) -> list[str]:
    return [found.name for found in weights_of(Foreign("a file", tensors), part)]


def test_flat_names_are_taken_as_they_are() -> None:
    assert names(None, tensor("a.b"), tensor("c")) == ["a.b", "c"]


def test_the_only_part_is_opened_however_deep_it_lies() -> None:
    assert names(None, tensor("state", "model", "a.b"), tensor("state", "model", "c")) == ["a.b", "c"]


def test_of_several_parts_one_is_named() -> None:
    both = (tensor("model", "a"), tensor("optimizer", "0", "m"))
    with pytest.raises(ConfigError, match=r"model \(1 tensor\), optimizer \(1 tensor\)"):
        names(None, *both)
    assert names("model", *both) == ["a"]
    with pytest.raises(ConfigError, match="no name begins so"):
        names("mod", *both)


def test_a_part_is_found_by_keys_and_by_dots() -> None:
    assert names("net.model", tensor("net", "model", "a"), tensor("net.model.b"), tensor("net.other")) == ["a", "b"]


def test_ties_follow_their_tensor() -> None:
    (first, second) = weights_of(
        Foreign("a file", (tensor("model", "a"), tensor("model", "b", tied_to=("model", "a")))), "model"
    )
    assert (first.path, second.tied_to) == (("a",), ("a",))
    (_, second) = weights_of(Foreign("a file", (tensor("m.a"), tensor("m.b", tied_to=("m.a",)))), "m")
    assert second.tied_to == ("a",)


def test_what_holds_no_tensor_and_what_mixes_levels_is_refused() -> None:
    with pytest.raises(ConfigError, match="it holds no tensor"):
        names(None)
    with pytest.raises(ConfigError, match="which part"):
        names(None, tensor("a"), tensor("model", "b"))
