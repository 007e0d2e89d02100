import numpy as np
import pytest

from elastic.data.interleave import PERIOD, Interleave, check_weights, shares
from elastic.data.ledger import digest_of
from elastic.errors import ConfigError

SIZES = (10, 20, 7)


def mixture(*history):
    return Interleave(SIZES, seed=3, shuffle=True, numbered_epochs=(False,) * 3, history=history)


def test_the_mixed_order_is_frozen_because_snapshots_refer_to_it():
    order = mixture((0, (3.0, 1.0, 0.5)), (64, (1.0, 1.0, 0.0)))
    assert order.ids(0, 12).tolist() == [6, 18, 58, 15, 2, 0, 12, 37, 21, 9, 24, 55]
    assert digest_of(order.ids(0, 200_000)) == "8dcd682298f1b8ed"


def test_any_part_of_the_order_can_be_had_without_the_part_before():
    order = mixture((0, (3.0, 1.0, 0.5)), (100, (1.0, 5.0, 0.0)), (70_000, (1.0, 1.0, 1.0)))
    whole = order.ids(0, 150_000)
    for start, stop in ((99, 102), (65_530, 65_545), (69_999, 70_001), (149_000, 150_000)):
        assert order.ids(start, stop).tolist() == whole[start:stop].tolist()


def test_counts_have_a_closed_form_that_agrees_with_the_order():
    order = mixture((0, (3.0, 1.0, 0.5)), (100, (1.0, 5.0, 0.0)), (70_000, (1.0, 1.0, 1.0)))
    sources = order.ids(0, 150_000) % 3
    for position in (0, 1, 99, 100, 101, 65_636, 65_637, 70_000, 150_000):
        assert order.counts(position).tolist() == np.bincount(sources[:position], minlength=3).tolist()


def test_no_source_strays_from_its_share_at_any_position():
    weights = np.array([0.7, 0.2, 0.1])
    sources = mixture((0, tuple(weights))).ids(0, 2 * PERIOD) % 3
    counts = np.cumsum(sources[:, None] == np.arange(3), axis=0)
    ideal = np.arange(1, sources.size + 1)[:, None] * weights
    assert np.abs(counts - ideal).max() < 3


def test_each_source_goes_through_its_own_epochs():
    order = mixture((0, (1.0, 1.0, 1.0)))
    ids = order.ids(0, 600)
    for source, size in enumerate(SIZES):
        own = ids[ids % 3 == source] // 3
        for epoch in range(own.size // size):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


def test_a_source_goes_on_where_it_was_when_the_weights_change():
    changed = mixture((0, (1.0, 1.0, 1.0))).changed(50, (5.0, 1.0, 0.0))
    ids = changed.ids(0, 200)
    own = ids[ids % 3 == 0] // 3
    assert sorted(own[:10].tolist()) == list(range(10))
    assert sorted(own[10:20].tolist()) == list(range(10))
    assert not (ids[50:] % 3 == 2).any()
    assert ids[:50].tolist() == mixture((0, (1.0, 1.0, 1.0))).ids(0, 50).tolist()


def test_a_change_that_was_never_reached_is_forgotten():
    first = (1.0, 1.0, 1.0)
    order = mixture((0, first)).changed(80, (5.0, 1.0, 0.0)).changed(40, (0.0, 1.0, 0.0))
    assert order.history == ((0, first), (40, (0.0, 1.0, 0.0)))
    assert order.changed(40, first).history == ((0, first),)
    assert order.changed(90, (0.0, 1.0, 0.0)) == order
    assert order.changed(0, (1.0, 0.0, 0.0)).history == ((0, (1.0, 0.0, 0.0)),)


def test_numbered_sources_keep_their_epoch_in_the_id():
    order = Interleave((4,), 1, True, (True,), ((0, (1.0,)),))
    assert sorted(order.ids(0, 12).tolist()) == list(range(12))


@pytest.mark.parametrize(
    "weights", [(1.0,), (1, 2, 3), (0.0, 1.0), (1e-9, 1.0), (1 / 3, 1 / 3, 1 / 3), (*(1e-9,) * 7, 1.0)]
)
def test_shares_fill_the_period_and_only_zero_gets_nothing(weights):
    found = shares(weights)
    assert found.sum() == PERIOD
    assert [share > 0 for share in found] == [weight > 0 for weight in weights]
    assert np.abs(found / PERIOD - np.array(weights) / sum(weights)).max() < 8 / PERIOD


@pytest.mark.parametrize(
    "weights",
    [{"a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": -1, "b": 1}, {"a": float("nan"), "b": 1}, {"a": 0, "b": 0}],
)
def test_weights_that_cannot_be_used_are_refused(weights):
    with pytest.raises(ConfigError, match="weights"):
        check_weights(["a", "b"], weights)


def test_weights_are_taken_in_the_order_of_the_sources():
    assert check_weights(["a", "b"], {"b": 2, "a": 1}) == (1.0, 2.0)
