import json
from dataclasses import replace

import pytest

from elastic.data.loader_state import LoaderState, MixtureState, order_of
from elastic.data.order import Order
from elastic.errors import RestoreError

PLAIN = LoaderState(
    cursor=130,
    samples_seen=130,
    tokens_seen=2**40,
    seed=17,
    shuffle=True,
    size=100,
    numbered_epochs=False,
    global_batch_size=10,
    fingerprint="abc",
)
MIXED = replace(
    PLAIN, mixture=MixtureState(("a", "b"), (60, 40), (False, True), ((0, (1.0, 2.0)), (50, (1.0, 0.1))), (70, 60))
)


@pytest.mark.parametrize("state", [PLAIN, MIXED])
def test_the_state_survives_json(state):
    assert LoaderState.from_tree(json.loads(json.dumps(state.to_tree()))) == state


def test_the_tree_says_in_which_epoch_the_cursor_stands():
    assert PLAIN.to_tree()["epoch"] == 1


def test_the_order_of_a_run_is_had_from_the_tree_alone():
    assert order_of(PLAIN.to_tree()) == Order(100, 17)
    assert order_of(MIXED.to_tree()) == MIXED.order()
    assert MIXED.order().ids(0, 90).tolist() == order_of(json.loads(json.dumps(MIXED.to_tree()))).ids(0, 90).tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [("size", 99), ("seed", 18), ("shuffle", False), ("global_batch_size", 20), ("fingerprint", "abd")],
)
def test_another_order_is_refused_by_the_name_of_what_differs(field, value):
    with pytest.raises(RestoreError) as refusal:
        replace(PLAIN, **{field: value}).check_continues(PLAIN)
    assert f"{field} is {value!r}, was {getattr(PLAIN, field)!r}" in str(refusal.value)


def test_everything_that_differs_is_named_at_once():
    with pytest.raises(RestoreError, match=r"size is 99, was 100; seed is 18, was 17"):
        replace(PLAIN, size=99, seed=18).check_continues(PLAIN)


def test_other_sources_are_refused_and_other_weights_are_not():
    mixture = MIXED.mixture
    with pytest.raises(RestoreError, match="mixture names"):
        replace(MIXED, mixture=replace(mixture, names=("a", "c"))).check_continues(MIXED)
    with pytest.raises(RestoreError, match="mixture sizes"):
        replace(MIXED, mixture=replace(mixture, sizes=(40, 60))).check_continues(MIXED)
    with pytest.raises(RestoreError, match="mixture names"):
        PLAIN.check_continues(MIXED)
    replace(MIXED, mixture=replace(mixture, history=((0, (1.0, 1.0)),))).check_continues(MIXED)


def test_a_dataset_without_fingerprint_is_not_held_against_one():
    replace(PLAIN, fingerprint="").check_continues(PLAIN)
    PLAIN.check_continues(replace(PLAIN, fingerprint=""))


@pytest.mark.parametrize(
    "tree", [{}, {"schema_version": 2}, {"schema_version": 1}, {**PLAIN.to_tree(), "size": "many"}]
)
def test_a_state_that_cannot_be_read_is_refused(tree):
    with pytest.raises(RestoreError, match="the loader's state"):
        LoaderState.from_tree(tree)
