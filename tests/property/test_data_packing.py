"""Over any documents: every token of every document exactly once an epoch, at whatever number of ranks."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.data.loader import ElasticLoader
from elastic.data.packing import ArrayDocuments, PackedDataset, document_mask
from elastic.errors import ConfigError

examples = settings(derandomize=True, deadline=None, max_examples=80)
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=25).filter(any)


def documents_of(lengths):
    """Document d holds the tokens 1000 d, 1000 d + 1, ...: each token says where it belongs."""
    return ArrayDocuments([1000 * number + np.arange(length) for number, length in enumerate(lengths)])


def check_epoch(items, lengths):
    """Every token once, in the right document, with its target and its position; padding only at the end."""
    found = defaultdict(list)
    for item in items:
        tokens, targets, positions, documents = (
            item[name].tolist() for name in ("tokens", "targets", "position_ids", "document_ids")
        )
        filled = sum(document >= 0 for document in documents)
        assert documents[filled:] == [-1] * (len(documents) - filled)
        assert targets[filled:] == [-100] * (len(documents) - filled)
        for place in range(filled):
            document, inside = divmod(tokens[place], 1000)
            assert documents[place] == document
            assert targets[place] == (tokens[place] + 1 if inside + 1 < lengths[document] else -100)
            continues = place > 0 and documents[place - 1] == document
            assert positions[place] == (positions[place - 1] + 1 if continues else 0)
            found[document].append(inside)
    assert {document: sorted(inside) for document, inside in found.items()} == {
        document: list(range(length)) for document, length in enumerate(lengths) if length
    }


@examples
@given(lengths=LENGTHS, size=st.integers(1, 30), seed=st.integers(0, 2**40), epoch=st.integers(0, 3))
def test_split_packs_hold_every_token_of_an_epoch_once(lengths, size, seed, epoch):
    packed = PackedDataset(documents_of(lengths), size, seed=seed)
    items = [packed[epoch * len(packed) + index] for index in range(len(packed))]
    check_epoch(items, lengths)
    assert len(packed) == -(-sum(lengths) // size), "no padding but in the last pack"
    assert packed.token_count(np.arange(len(packed)) + epoch * len(packed)) == sum(lengths)


@examples
@given(lengths=LENGTHS, size=st.integers(1, 30), seed=st.integers(0, 2**40))
def test_whole_packs_cut_no_document_that_fits(lengths, size, seed):
    packed = PackedDataset(documents_of(lengths), size, mode="whole", seed=seed)
    items = [packed[index] for index in range(len(packed))]
    check_epoch(items, lengths)
    packs_of = defaultdict(int)
    for item in items:
        for document in set(item["document_ids"].tolist()) - {-1}:
            packs_of[document] += 1
    assert all(count == -(-lengths[document] // size) for document, count in packs_of.items())
    assert packed.token_count(np.arange(len(packed))) == sum(lengths)
    filled = [int((item["document_ids"] >= 0).sum()) for item in items]
    assert all(left + right > size for left, right in zip(filled, filled[1:], strict=False)) or max(lengths) > size


@examples
@given(lengths=LENGTHS, size=st.integers(1, 12), seed=st.integers(0, 99), batch=st.integers(4, 9), data=st.data())
def test_four_three_four_ranks_see_every_token_of_every_epoch_once(lengths, size, seed, batch, data):
    documents = documents_of(lengths)
    epochs = 2
    state, items, ended = None, [], False
    for dp_size in (4, 3, 4):
        loaders = []
        for rank in range(dp_size):
            packed = PackedDataset(documents, size, seed=seed)
            loader = ElasticLoader(packed, global_batch_size=batch, seed=seed, epochs=epochs, collate_fn=list)
            if state is not None:
                loader.load_state_dict(state)
            loader.bind(rank, dp_size)
            loaders.append(loader)
        steps = 10**6 if dp_size == 4 and state is not None else data.draw(st.integers(0, 3))
        while steps and not ended:
            for loader in loaders:
                found = loader.fetch()
                if found is None:
                    ended = True
                    continue
                if found.ids.size:
                    items += zip(found.ids.tolist(), found.data, strict=True)
                loader.advance()
            steps -= 1
        state = loaders[0].state_dict()
    count = len(packed)
    assert sorted(index for index, _ in items) == list(range(epochs * count))
    for epoch in range(epochs):
        check_epoch([item for index, item in items if index // count == epoch], lengths)
    assert state["tokens_seen"] == epochs * sum(lengths)


def test_a_pack_does_not_depend_on_what_was_asked_before():
    lengths = [5, 17, 0, 8, 30, 2]
    one, other = (PackedDataset(documents_of(lengths), 7, seed=4) for _ in range(2))
    for index in (40, 3, 25, 0, 41):
        one[index]
    assert one[25]["tokens"].tolist() == other[25]["tokens"].tolist()


def test_split_packs_differ_from_epoch_to_epoch_and_seed_to_seed():
    lengths = [5, 17, 3, 8, 30, 2]
    packed = PackedDataset(documents_of(lengths), 7, seed=4)
    first = [packed[index]["tokens"].tolist() for index in range(len(packed))]
    second = [packed[len(packed) + index]["tokens"].tolist() for index in range(len(packed))]
    assert first != second
    assert packed.fingerprint != PackedDataset(documents_of(lengths), 7, seed=5).fingerprint


def test_the_mask_is_causal_and_stays_within_a_document():
    mask = document_mask(torch.tensor([[3, 3, 5, -1]]))
    assert mask.int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"sequence_length": 0}, "sequence_length"),
        ({"mode": "best"}, "mode"),
        ({"documents": ArrayDocuments([[], []])}, "documents"),
        ({"documents": ArrayDocuments([])}, "documents"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(arguments, field):
    with pytest.raises(ConfigError) as refusal:
        PackedDataset(**{"documents": documents_of([3]), "sequence_length": 4, **arguments})
    assert refusal.value.field == field


def test_a_whole_pack_beyond_the_last_is_an_index_error():
    with pytest.raises(IndexError):
        PackedDataset(documents_of([3]), 4, mode="whole")[1]
