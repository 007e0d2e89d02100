import numpy as np
import pytest

from elastic.data.ledger import digest_of
from elastic.data.order import Order, check_dp_size, cut, derive_seed
from elastic.errors import ConfigError


def test_the_order_is_frozen_because_snapshots_refer_to_it():
    assert Order(1000, 17).ids(0, 8).tolist() == [106, 292, 343, 481, 871, 876, 183, 619]
    assert Order(1000, 17).ids(1000, 1004).tolist() == [747, 25, 381, 927]
    assert digest_of(Order(10**12, -5).ids(10**13, 10**13 + 1000)) == "fa4bf267b0019e3e"
    assert derive_seed(1, 2, 3) == 0x6AE515C1C0AC7E37


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 4096, 4097])
def test_every_epoch_holds_every_id_exactly_once(size):
    order = Order(size, seed=3)
    for epoch in (0, 1, 7):
        assert sorted(order.ids(epoch * size, (epoch + 1) * size).tolist()) == list(range(size))


def test_epochs_and_seeds_have_permutations_of_their_own():
    orders = [tuple(Order(100, seed).ids(epoch * 100, epoch * 100 + 100)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == len(orders)


def test_a_range_over_many_epochs_is_its_epochs_side_by_side():
    order = Order(7, seed=9)
    pieces = [order.ids(epoch * 7, epoch * 7 + 7) for epoch in range(50)]
    assert order.ids(0, 350).tolist() == np.concatenate(pieces).tolist()


def test_unshuffled_order_counts_up_in_every_epoch():
    assert Order(3, seed=1, shuffle=False).ids(1, 8).tolist() == [1, 2, 0, 1, 2, 0, 1]


def test_numbered_epochs_give_ids_that_never_come_back():
    order = Order(5, seed=2, numbered_epochs=True)
    assert sorted(order.ids(0, 15).tolist()) == list(range(15))
    assert (order.ids(5, 10) % 5).tolist() == Order(5, seed=2).ids(5, 10).tolist()


def test_every_id_is_about_equally_often_at_every_place():
    counts = np.zeros((20, 20))
    for seed in range(2000):
        counts[np.arange(20), Order(20, seed).ids(0, 20)] += 1
    chi_squared = float(((counts - 100) ** 2 / 100).sum())
    assert chi_squared < 450, "361 degrees of freedom: above 450 is 1 in 1000"


def test_neighbours_in_the_order_are_unrelated():
    ids = Order(100_003, seed=1).ids(0, 100_003)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(ids, np.arange(ids.size))[0, 1]) < 0.02


def test_an_empty_range_and_an_epoch():
    order = Order(10, seed=0)
    assert order.ids(4, 4).size == 0
    assert [order.epoch(position) for position in (0, 9, 10, 25)] == [0, 0, 1, 2]


def test_uneven_cut_differs_by_at_most_one_sample():
    assert [cut(10, rank, 4) for rank in range(4)] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert [cut(8, rank, 4) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_more_ranks_than_samples_are_refused_with_numbers_and_cure():
    check_dp_size(4, 4)
    with pytest.raises(ConfigError, match=r"global_batch_size = 3: 5 data-parallel .* at least 5, or allow at most 3"):
        check_dp_size(3, 5)
