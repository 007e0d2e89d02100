"""What is declared of a module's tensors: the innermost word counts, names are global, mistakes are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic.errors import CaptureError, ConfigError
from elastic.snapshot.declared import Declarations, Declared, declare


class Tree:
    """As much of a module as declarations look at."""

    def __init__(self, **below: Tree) -> None:
        self.below = below

    def named_modules(self, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        yield prefix, self
        for name, part in self.below.items():
            yield from part.named_modules(f"{prefix}.{name}" if prefix else name)


def test_declarations_on_a_module_and_around_it_add_up() -> None:
    expert = declare(Tree(), cuts={"up": {"tp": 0}})
    experts = declare(Tree(**{"0": expert}), held_at={"ep": 1}, names={"0": "2"})
    layers = declare(Tree(**{"0": Tree(experts=experts)}), held_at={"pp": 1}, names={"0": "8"})
    found = Declarations.of(Tree(module=Tree(layers=layers)))
    declared = found.of_tensor("module.layers.0.experts.0.up")
    assert declared == Declared("layers.8.experts.2.up", (("tp", 0),), (("ep", 1), ("pp", 1)))
    assert found.of_tensor("module.layers.0.norm") == Declared("layers.8.norm", (), (("pp", 1),))
    assert found.of_tensor("module.embed") == Declared("embed")
    found.check_used("model")


def test_wrappers_inside_of_a_declared_module_are_no_part_of_its_names() -> None:
    found = Declarations.of(declare(Tree(), cuts={"a.weight": {"tp": 1}}, names={"a": "b"}))
    assert found.of_tensor("_orig_mod.a._checkpoint_wrapped_module.weight") == Declared("b.weight", (("tp", 1),))


def test_names_are_mapped_at_dots_and_the_longest_beginning_counts() -> None:
    found = Declarations.of(declare(Tree(), names={"1": "9", "1.norm": "final"}))
    names = ("1.weight", "10.weight", "1.norm.bias", "1")
    assert [found.of_tensor(name).name for name in names] == ["9.weight", "10.weight", "final.bias", "9"]
    renamed = Declarations.of(declare(Tree(), names=lambda name: name.replace("local", "global")))
    assert renamed.of_tensor("local.weight").name == "global.weight"


def test_the_innermost_holders_of_an_axis_and_the_innermost_cuts_count() -> None:
    inner = declare(Tree(), cuts={"w": {"tp": 0}}, held_at={"pp": (3, 0, 3)})
    found = Declarations.of(declare(Tree(a=inner), cuts={"a.w": {"tp": 1}}, held_at={"pp": 1, "ep": 0}))
    assert found.of_tensor("a.w") == Declared("a.w", (("tp", 0),), (("ep", 0), ("pp", (0, 3))))


def test_cuts_of_a_tensor_that_is_not_there_are_named() -> None:
    found = Declarations.of(Tree(a=declare(Tree(), cuts={"weigth": {"tp": 0}})))
    found.of_tensor("a.weight")
    with pytest.raises(CaptureError, match=r"cuts are declared of a\.weigth, .* \(model\); correct the name"):
        found.check_used("model")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"cuts": {"w": {"rows": 0}}}, "unknown axis 'rows'; use pp"),
        ({"cuts": {"w": {("dp", "rows"): 0}}}, "unknown axis 'rows'"),
        ({"cuts": {"w": {"tp": "0"}}}, "needs the number of a dimension"),
        ({"held_at": {"stage": 0}}, "unknown axis 'stage'"),
        ({"held_at": {"pp": -1}}, "needs a coordinate"),
        ({"held_at": {"pp": ()}}, "needs a coordinate"),
        ({"cuts": {"w": 0}}, "name the axes that cut it"),
        ({"cuts": "w"}, "name tensors of the module"),
        ({"held_at": 1}, "name axes and their coordinates"),
        ({"names": 3}, "give a mapping of names"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_said(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        declare(Tree(), **wrong)
