"""What the run relies on in a loader: share, cursor, weight, state, prefetch."""

import gc
import json
import multiprocessing
import random
import threading

import numpy as np
import pytest
import torch

from elastic.data.ledger import digest_of
from elastic.data.loader import ElasticLoader
from elastic.data.mixture import Mixture
from elastic.data.order import Order
from elastic.errors import ConfigError, InternalError, RestoreError


class Squares(torch.utils.data.Dataset):
    def __init__(self, size=100):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(float(index)), torch.tensor(float(index) ** 2)


class Lengths(Squares):
    """Sample i holds i + 1 tokens."""

    fingerprint = "lengths-1"

    def token_count(self, ids):
        return int((np.asarray(ids) + 1).sum())


class Noisy(Squares):
    """Every sample draws from all three generators."""

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def take(loader, steps):
    ids = []
    for _ in range(steps):
        batch = loader.fetch()
        ids += batch.ids.tolist()
        loader.advance()
    return ids


def test_the_cursor_moves_when_a_batch_is_consumed_and_not_when_it_is_fetched():
    loader = ElasticLoader(Squares(), global_batch_size=10)
    loader.bind(0, 2)
    first = loader.fetch()
    assert loader.fetch() is first
    assert loader.state_dict()["cursor"] == 0
    entry = loader.advance()
    assert (entry.start, entry.stop, entry.samples) == (0, 5, 5)
    assert entry.digest == digest_of(first.ids)
    assert loader.state_dict()["cursor"] == 10
    assert loader.samples_seen == 10


def test_advancing_without_a_batch_is_a_bug():
    loader = ElasticLoader(Squares(), global_batch_size=10)
    with pytest.raises(InternalError):
        loader.advance()


def test_a_batch_holds_the_samples_that_its_ids_and_positions_say():
    loader = ElasticLoader(Squares(), global_batch_size=10, seed=5)
    loader.bind(1, 3)
    batch = loader.fetch()
    x, y = batch
    assert batch.positions.tolist() == [3, 4, 5]
    assert batch.ids.tolist() == Order(100, 5).ids(3, 6).tolist()
    assert x.tolist() == [float(index) for index in batch.ids]
    assert y.tolist() == [float(index) ** 2 for index in batch.ids]
    assert batch[1] is y
    assert len(batch) == 2


def test_dict_data_is_read_by_key_and_moves_to_a_device_whole():
    class Dicts(Squares):
        def __getitem__(self, index):
            return {"x": torch.tensor(index), "name": str(index), "pair": (torch.tensor(1), [torch.tensor(2)])}

    loader = ElasticLoader(Dicts(), global_batch_size=4)
    batch = loader.fetch()
    assert batch["x"].tolist() == batch.ids.tolist()
    assert set(batch.keys()) == {"x", "name", "pair"}
    moved = batch.to("meta")
    assert moved["x"].device.type == "meta"
    assert moved["pair"][1][0].device.type == "meta"
    assert moved["name"] == batch["name"]
    assert moved.ids.tolist() == batch.ids.tolist()
    assert moved.weight == batch.weight


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 7])
def test_weighted_gradients_averaged_over_uneven_shares_are_the_global_ones(dp_size):
    def gradient(batch, weight):
        parameter = torch.ones(1, dtype=torch.float64, requires_grad=True)
        x, y = batch
        (((parameter * x - y) ** 2).mean() * weight).backward()
        return parameter.grad

    whole = ElasticLoader(Squares(), global_batch_size=10)
    expected = gradient(whole.fetch(), 1.0)
    total = torch.zeros(1, dtype=torch.float64)
    for rank in range(dp_size):
        loader = ElasticLoader(Squares(), global_batch_size=10)
        loader.bind(rank, dp_size)
        batch = loader.fetch()
        total += gradient(batch, batch.weight)
    torch.testing.assert_close(total / dp_size, expected, rtol=1e-6, atol=0)


def test_a_rank_without_a_share_is_refused_at_bind_with_the_numbers():
    loader = ElasticLoader(Squares(), global_batch_size=3)
    with pytest.raises(ConfigError, match=r"global_batch_size = 3: 4 data-parallel ranks"):
        loader.bind(0, 4)


def test_a_resize_between_two_steps_goes_on_at_the_same_sample():
    taken = []
    states = None
    for dp_size, steps in ((4, 3), (3, 4), (4, 3)):
        loaders = [ElasticLoader(Squares(), global_batch_size=10, seed=2) for _ in range(dp_size)]
        for rank, loader in enumerate(loaders):
            if states:
                loader.load_state_dict(json.loads(json.dumps(states)))
            loader.bind(rank, dp_size)
        for _ in range(steps):
            for loader in loaders:
                taken += take(loader, 1)
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        states = loaders[0].state_dict()
    assert taken == Order(100, 2).ids(0, 100).tolist()
    assert states["samples_seen"] == 100
    assert states["epoch"] == 1


def test_what_was_fetched_but_not_consumed_is_fetched_again_after_a_bind():
    loader = ElasticLoader(Squares(), global_batch_size=10)
    loader.bind(0, 2)
    take(loader, 2)
    loader.fetch()
    loader.bind(0, 1)
    assert loader.fetch().positions.tolist() == list(range(20, 30))


def test_endless_batches_run_across_the_end_of_an_epoch():
    loader = ElasticLoader(Squares(7), global_batch_size=5)
    ids = take(loader, 7)
    assert all(sorted(ids[epoch * 7 : epoch * 7 + 7]) == list(range(7)) for epoch in range(5))
    assert loader.epoch == 5


def test_the_last_step_of_finite_data_is_short_and_weighed_by_its_own_size():
    loaders = [ElasticLoader(Squares(11), global_batch_size=8, epochs=1) for _ in range(2)]
    for rank, loader in enumerate(loaders):
        loader.bind(rank, 2)
    ids = [loader_ids for loader in loaders for loader_ids in take(loader, 1)]
    shares = [loader.fetch() for loader in loaders]
    assert [batch.weight for batch in shares] == [2 / 3, 4 / 3]
    ids += [index for loader in loaders for index in take(loader, 1)]
    assert sorted(ids) == list(range(11))
    assert [loader.fetch() for loader in loaders] == [None, None]
    assert loaders[0].samples_seen == 11


def test_a_rank_left_empty_by_the_short_last_step_gets_a_stand_in_that_weighs_nothing():
    loaders = [ElasticLoader(Squares(9), global_batch_size=8, epochs=1) for _ in range(2)]
    for rank, loader in enumerate(loaders):
        loader.bind(rank, 2)
        take(loader, 1)
    batches = [loader.fetch() for loader in loaders]
    assert [batch.weight for batch in batches] == [0.0, 2.0]
    assert [batch.ids.size for batch in batches] == [0, 1]
    assert batches[0][0].shape == (1,)
    assert [loader.advance().samples for loader in loaders] == [0, 1]


def test_drop_last_leaves_out_the_short_step():
    loader = ElasticLoader(Squares(11), global_batch_size=8, epochs=2, drop_last=True)
    take(loader, 2)
    assert loader.fetch() is None
    assert ElasticLoader(Squares(5), global_batch_size=8, epochs=1, drop_last=True).fetch() is None


def test_tokens_are_counted_over_all_ranks_and_told_by_share():
    loaders = [ElasticLoader(Lengths(10), global_batch_size=5) for _ in range(2)]
    entries, weights = [], []
    for rank, loader in enumerate(loaders):
        loader.bind(rank, 2)
        for _ in range(2):
            weights.append(loader.fetch().token_weight)
            entries.append(loader.advance())
    assert [loader.tokens_seen for loader in loaders] == [55, 55]
    assert sum(entry.tokens for entry in entries) == 55
    assert sum(weights[::2]) == pytest.approx(2)
    uncounted = ElasticLoader(Squares(), global_batch_size=5)
    take(uncounted, 1)
    assert uncounted.tokens_seen == 0


def test_loading_a_state_changes_nothing_when_it_is_refused():
    saved = ElasticLoader(Squares(), global_batch_size=10, seed=1)
    take(saved, 3)
    other = ElasticLoader(Squares(90), global_batch_size=10, seed=1)
    with pytest.raises(RestoreError, match="size is 90, was 100"):
        other.load_state_dict(saved.state_dict())
    assert other.cursor == 0
    changed = Lengths()
    changed.fingerprint = "lengths-2"
    original = ElasticLoader(Lengths(), global_batch_size=10).state_dict()
    with pytest.raises(RestoreError, match="fingerprint"):
        ElasticLoader(changed, global_batch_size=10).load_state_dict(original)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"global_batch_size": 4, "epochs": 0}, "epochs"),
        ({"global_batch_size": 4, "num_workers": -1}, "num_workers"),
        ({"global_batch_size": 4, "prefetch": 0}, "prefetch"),
        ({"global_batch_size": 4, "seed": 2**63}, "seed"),
        ({"global_batch_size": 4, "dataset": iter([1])}, "dataset"),
        ({"global_batch_size": 4, "dataset": Squares(0)}, "dataset"),
    ],
)
def test_values_that_cannot_be_used_are_refused_by_name(arguments, field):
    dataset = arguments.pop("dataset", Squares())
    with pytest.raises(ConfigError) as refusal:
        ElasticLoader(dataset, **arguments)
    assert refusal.value.field == field


def test_workers_deliver_what_the_training_thread_would_and_leave_its_generators_alone():
    plain = ElasticLoader(Squares(), global_batch_size=8, seed=3)
    plain.bind(1, 3)
    expected = [(batch.ids.tolist(), batch[1].tolist()) for batch in consumed(plain, 6)]
    found = []

    def in_a_thread():
        loader = ElasticLoader(Squares(), global_batch_size=8, seed=3, num_workers=2, prefetch=2)
        loader.bind(1, 3)
        torch.manual_seed(7)
        found.extend((batch.ids.tolist(), batch[1].tolist()) for batch in consumed(loader, 3))
        loader.bind(1, 3)  # drops what is on its way
        found.extend((batch.ids.tolist(), batch[1].tolist()) for batch in consumed(loader, 3))
        found.append(torch.rand(()).item())
        loader.close()

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    drawn = found.pop()
    assert found == expected
    torch.manual_seed(7)
    assert drawn == torch.rand(()).item()


def test_random_augmentation_in_workers_depends_on_the_position_alone():
    def samples(dp_size, num_workers, skip):
        rows = []
        for rank in range(dp_size):
            loader = ElasticLoader(Noisy(), global_batch_size=4, seed=3, num_workers=num_workers)
            loader._cursor = skip
            loader.bind(rank, dp_size)
            rows += [
                (int(p), *row)
                for batch in consumed(loader, 3)
                for p, row in zip(batch.positions, batch.data.tolist(), strict=True)
            ]
            loader.close()
        return sorted(rows)

    whole = samples(1, 1, 0)
    assert len({row[2:] for row in whole}) == len(whole)
    assert samples(2, 2, 0) == whole
    assert samples(1, 1, 4)[:8] == whole[4:]


def test_a_dataset_that_cannot_reach_the_workers_is_refused_with_the_cure():
    class Local(Squares):
        pass

    loader = ElasticLoader(Local(), global_batch_size=4, num_workers=1)
    with pytest.raises(ConfigError, match="cannot be sent to loader processes"):
        loader.fetch()


def consumed(loader, steps):
    for _ in range(steps):
        yield loader.fetch()
        loader.advance()


def two_sources():
    return Mixture({"small": Squares(20), "large": Squares(60)}, weights={"small": 1, "large": 3})


def test_a_mixture_is_drawn_by_its_weights_and_each_source_whole():
    loader = ElasticLoader(two_sources(), global_batch_size=8)
    ids = take(loader, 10)
    small = [index // 2 for index in ids if index % 2 == 0]
    large = [index // 2 for index in ids if index % 2 == 1]
    assert sorted(small) == list(range(20))
    assert sorted(large) == list(range(60))
    source, index = loader.dataset.source_of(ids[0])
    assert loader.dataset[ids[0]][0].item() == index
    assert source in ("small", "large")


def test_new_weights_take_effect_from_the_next_step_that_was_not_delivered():
    loader = ElasticLoader(two_sources(), global_batch_size=8)
    take(loader, 2)
    delivered = loader.fetch()
    before = delivered.ids.tolist()
    loader.dataset.set_weights({"small": 1, "large": 0})
    assert loader.fetch() is delivered
    loader.advance()
    assert before == two_sources_ids(16, 24)
    assert all(index % 2 == 0 for index in take(loader, 2))
    loader.dataset.set_weights({"small": 0, "large": 1})
    assert loader.state_dict()["mixture"]["history"] == [[0, [1.0, 3.0]], [24, [1.0, 0.0]], [40, [0.0, 1.0]]]


def two_sources_ids(start, stop):
    return ElasticLoader(two_sources(), global_batch_size=8).order.ids(start, stop).tolist()


def test_the_history_of_weights_survives_a_restore_and_the_constructor_does_not_override_it():
    loader = ElasticLoader(two_sources(), global_batch_size=8)
    take(loader, 2)
    loader.dataset.set_weights({"small": 1, "large": 1})
    take(loader, 1)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["mixture"]["counts"] == [4 + 4, 12 + 4]
    other = ElasticLoader(two_sources(), global_batch_size=8)
    other.load_state_dict(state)
    assert other.dataset.weights == {"small": 1.0, "large": 1.0}
    assert take(other, 5) == take(loader, 5)
    other.dataset.set_weights({"small": 1, "large": 0})
    assert all(index % 2 == 0 for index in take(other, 1))


def test_new_weights_reach_batches_that_workers_had_already_prefetched():
    loader = ElasticLoader(two_sources(), global_batch_size=8, num_workers=1, prefetch=4)
    take(loader, 1)
    loader.dataset.set_weights({"small": 1, "large": 0})
    batch = loader.fetch()
    assert all(index % 2 == 0 for index in batch.ids)
    assert batch[0].tolist() == [float(index // 2) for index in batch.ids]
    loader.close()


@pytest.mark.parametrize(
    "build",
    [
        lambda: Mixture({}, weights={}),
        lambda: Mixture({"a": Squares(0)}, weights={"a": 1}),
        lambda: Mixture({"a": two_sources()}, weights={"a": 1}),
        lambda: ElasticLoader(two_sources(), global_batch_size=4, epochs=1),
    ],
)
def test_a_mixture_that_cannot_work_is_refused(build):
    with pytest.raises(ConfigError):
        build()


class Failing(Squares):
    def __getitem__(self, index):
        raise KeyError(f"sample {index} is broken")


def test_an_error_in_a_worker_reaches_the_training_thread_with_its_text():
    loader = ElasticLoader(Failing(), global_batch_size=4, num_workers=1)
    for _ in range(2):
        with pytest.raises(KeyError, match="is broken"):
            loader.fetch()
    loader.close()


def test_closed_or_dropped_loaders_leave_no_process_and_no_thread():
    def alive():
        threads = sum(thread.name == "elastic-prefetch" for thread in threading.enumerate())
        return threads, len(multiprocessing.active_children())

    before = alive()
    loader = ElasticLoader(Squares(), global_batch_size=4, num_workers=2)
    loader.fetch()
    assert alive() != before
    loader.close()
    assert alive() == before
    assert loader.fetch().ids.size == 4, "a closed loader can be used again"
    thread = loader._workers._thread
    del loader
    gc.collect()
    thread.join(timeout=10)
    assert alive() == before


def test_finite_data_ends_alike_with_workers():
    loader = ElasticLoader(Squares(11), global_batch_size=4, epochs=1, num_workers=2)
    ids = []
    while (batch := loader.fetch()) is not None:
        assert batch[0].tolist() == batch.ids.tolist()
        ids += batch.ids.tolist()
        loader.advance()
    assert sorted(ids) == list(range(11))
    loader.close()
