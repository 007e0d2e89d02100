"""Over any sizes, seeds, batches and resizes: every sample exactly once, and the audit finds every deviation."""

from collections import Counter
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic.data.interleave import Interleave
from elastic.data.ledger import LedgerRow, audit, decode_row, digest_of, encode_row
from elastic.data.order import Order, cut

SIZES = st.integers(1, 300)
SEEDS = st.integers(-(2**63), 2**63 - 1)
examples = settings(derandomize=True, deadline=None, max_examples=100)


@st.composite
def trajectories(draw):
    """Generations with their numbers of ranks; each begins at or before the step that the one before had reached."""
    batch = draw(st.integers(4, 24))
    reached, generations = 0, []
    for number in range(draw(st.integers(1, 5))):
        begin = draw(st.integers(max(0, reached - 3), reached))
        end = draw(st.integers(begin + 1, begin + 6))
        generations.append((number + 1, draw(st.integers(1, 4)), range(begin, end)))
        reached = end
    return batch, generations


def execute(order, batch, generations):
    return [
        LedgerRow(generation, step, rank, dp_size, start, stop, digest_of(order.ids(start, stop)), stop - start)
        for generation, dp_size, steps in generations
        for step in steps
        for rank in range(dp_size)
        for start, stop in [tuple(step * batch + part for part in cut(batch, rank, dp_size))]
    ]


@examples
@given(size=SIZES, seed=SEEDS, epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(size, seed, epoch):
    ids = Order(size, seed).ids(epoch * size, (epoch + 1) * size)
    assert sorted(ids.tolist()) == list(range(size))


@examples
@given(size=SIZES, seed=SEEDS, start=st.integers(0, 5000), lengths=st.lists(st.integers(0, 90), max_size=6))
def test_the_order_does_not_depend_on_the_ranges_it_is_asked_for(size, seed, start, lengths):
    order = Order(size, seed)
    pieces, position = [], start
    for length in lengths:
        pieces += order.ids(position, position + length).tolist()
        position += length
    assert pieces == order.ids(start, position).tolist()


@examples
@given(size=st.integers(1, 500), ranks=st.integers(1, 64))
def test_a_cut_is_contiguous_balanced_and_whole(size, ranks):
    parts = [cut(size, rank, ranks) for rank in range(ranks)]
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(left[1] == right[0] for left, right in zip(parts, parts[1:], strict=False))
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 1


@examples
@given(size=SIZES, seed=SEEDS, epochs=st.integers(1, 3), before=st.integers(0, 20), batch=st.integers(4, 24))
def test_four_three_four_ranks_deliver_every_sample_of_an_epoch_once(size, seed, epochs, before, batch):
    order = Order(size, seed)
    steps = -(-size * epochs // batch)
    delivered = []
    for step in range(steps):
        ranks = 4 if step < before or step >= 2 * before else 3
        for rank in range(ranks):
            start, stop = cut(batch, rank, ranks)
            delivered += order.ids(step * batch + start, step * batch + stop).tolist()
    assert set(Counter(delivered[: size * epochs]).values()) == {epochs}


@examples
@given(size=SIZES, seed=SEEDS, trajectory=trajectories(), shuffled=st.randoms(use_true_random=False))
def test_any_run_of_generations_that_kept_to_the_order_is_clean(size, seed, trajectory, shuffled):
    batch, generations = trajectory
    order = Order(size, seed)
    rows = [decode_row(encode_row(row)) for row in execute(order, batch, generations)]
    shuffled.shuffle(rows)
    report = audit(rows, order, batch)
    assert report.clean
    assert report.samples == report.tokens == report.steps * batch == generations[-1][2].stop * batch


@examples
@given(seed=SEEDS, trajectory=trajectories(), data=st.data())
def test_any_damage_to_a_surviving_row_is_found(seed, trajectory, data):
    batch, generations = trajectory
    order = Order(1000, seed)
    rows = execute(order, batch, generations)
    last = [index for index, row in enumerate(rows) if row.generation == generations[-1][0]]
    index = data.draw(st.sampled_from(last))
    row = rows[index]
    damage = data.draw(st.sampled_from(["repeat", "skip", "digest", "lost", "moved"]))
    # A lost row of a step that an older generation had done too looks like that generation's work: no fault then.
    assume(damage != "lost" or not any(row.step in steps for _, _, steps in generations[:-1]))
    if damage == "repeat":
        wrong = replace(row, stop=row.stop + 1)
    elif damage == "skip":
        wrong = replace(row, stop=row.stop - 1)
    elif damage == "moved":
        wrong = replace(row, start=row.start + batch, stop=row.stop + batch)
    else:
        wrong = replace(row, digest=digest_of(order.ids(row.start + 1, row.stop + 1)))
    if damage in ("repeat", "skip", "moved"):
        wrong = replace(wrong, digest=digest_of(order.ids(wrong.start, wrong.stop)))
    rows = rows[:index] + ([] if damage == "lost" else [wrong]) + rows[index + 1 :]
    report = audit(rows, order, batch, last_step=generations[-1][2].stop - 1, first_step=0)
    assert not report.clean
    end = generations[-1][2].stop * batch
    assert report.repeated >= (damage == "repeat" and row.stop < end)  # beyond the end it repeats nothing
    assert report.skipped >= (damage in ("skip", "moved"))


@examples
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=SEEDS,
    changes=st.lists(st.tuples(st.integers(0, 400), st.lists(st.integers(0, 5), min_size=4, max_size=4)), max_size=4),
)
def test_each_source_of_a_mixture_is_drawn_epoch_by_epoch_whatever_the_weights_do(sizes, seed, changes):
    count = len(sizes)
    order = Interleave(tuple(sizes), seed, True, (False,) * count, ((0, (1.0,) * count),))
    for position, weights in sorted(changes):
        if any(weights[:count]):
            order = order.changed(position, tuple(map(float, weights[:count])))
    ids = order.ids(0, 600)
    assert ids.tolist() == [*order.ids(0, 250), *order.ids(250, 600)]
    for source, size in enumerate(sizes):
        own = ids[ids % count == source] // count
        assert own.size == order.counts(600)[source]
        for epoch in range(own.size // size):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
