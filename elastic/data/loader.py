"""ElasticLoader: the batches of a run, at a cursor that moves when a batch is consumed, not when it is fetched.

How a run drives it, once per generation and step:

    bind(dp_rank, dp_size)    which share is this rank's; what was prefetched for another share is dropped
    fetch()                   the batch at the cursor, None at the end; calling it again gives the same batch
    advance()                 the step that consumed it has ended: the cursor moves, samples and tokens are counted

Nothing here talks to other ranks: share, counts and order follow from the cursor alone, which is why the state that
any rank saves is the state of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from elastic.data.batch import Batch
from elastic.data.interleave import Interleave
from elastic.data.ledger import LedgerEntry, digest_of
from elastic.data.loader_state import LoaderState
from elastic.data.mixture import Mixture
from elastic.data.order import Ids, Order, SampleOrder, check_dp_size, cut
from elastic.data.prefetch import PrefetchedBatches, requests
from elastic.errors import ConfigError, InternalError

__all__ = ["Batch", "ElasticLoader"]

_BLOCK_IDS = 8192


class ElasticLoader:
    """Batches of any map-style dataset, in a global order that does not depend on the number of ranks.

    ``global_batch_size`` samples make a step, on however many ranks; each rank gets a contiguous share, uneven by at
    most one, with ``batch.weight`` to make up for it. Batches run across the ends of epochs. ``epochs=None`` never
    ends; with a number, the last step is short (``drop_last=True``: left out).

    ``num_workers`` processes fetch ``prefetch`` batches each ahead of the cursor. In them, python, numpy and torch
    generators are seeded for each sample from (seed, position), so that random augmentation depends neither on the
    number of ranks nor of workers; without workers samples are drawn in the caller's thread, under its generators.
    Worker processes come from a fork server: a rank has threads, and forking it may hang. The dataset and
    ``collate_fn`` are pickled for them.

    What the dataset may offer, besides ``__len__`` and ``__getitem__``: ``__getitems__(ids)`` (a list at once);
    ``token_count(ids) -> int``, called with the ids of a whole global step, for ``tokens_seen``, or
    ``tokens_per_sample``; ``fingerprint``, a string that is compared on a restore; ``numbered_epochs = True`` if it
    takes ``index + epoch * len`` and gives other items in each epoch.

    Raises ConfigError for values that cannot be used.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        _check_arguments(dataset, global_batch_size, seed, epochs, num_workers, prefetch)
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.seed, self.shuffle = int(seed), bool(shuffle)
        self._size = len(dataset)
        self._end = None if epochs is None else _end_position(self._size * epochs, global_batch_size, drop_last)
        self._num_workers, self._prefetch = num_workers, prefetch
        self._collate = collate_fn or default_collate
        self._start_method = multiprocessing_context
        self._order = self._first_order()
        self._get_many = getattr(dataset, "__getitems__", None)
        self._tokens_per_sample = getattr(dataset, "tokens_per_sample", None)
        counts = hasattr(dataset, "token_count") and getattr(dataset, "counts_tokens", True)
        self._token_count = dataset.token_count if counts and self._tokens_per_sample is None else None

        self._cursor = self._samples_seen = self._tokens_seen = 0
        self._dp_rank, self._dp_size = 0, 1
        self._block = _Block()
        self._current: _Current | None = None
        self._workers: PrefetchedBatches | None = None

    def bind(self, dp_rank: int, dp_size: int) -> None:
        """Make this loader deliver the share of data-parallel rank ``dp_rank`` of ``dp_size`` from the cursor on.

        Raises ConfigError if the global batch is too small to give every rank a sample.
        """
        check_dp_size(self.global_batch_size, dp_size)
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._drop_fetched()

    def fetch(self) -> Batch | None:
        """Return this rank's batch at the cursor, or None at the end. The cursor does not move."""
        if self._current is None:
            stop = self._step_stop(self._cursor)
            if stop <= self._cursor:
                return None
            self._current = self._load(stop)
        return self._current.batch

    def advance(self) -> LedgerEntry:
        """Move the cursor past the batch that ``fetch`` gave; call it when the step that consumed it has ended.

        Returns this rank's part, for the ledger.
        """
        current = self._current
        if current is None:
            raise InternalError("the loader was advanced without a batch", (f"cursor {self._cursor}",))
        batch = current.batch
        self._samples_seen += current.step_stop - self._cursor
        self._tokens_seen += current.step_tokens
        self._cursor = current.step_stop
        self._current = None
        return LedgerEntry(
            batch.start, batch.stop, digest_of(batch.ids), batch.stop - batch.start, current.local_tokens
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state at this boundary: a JSON-able tree, the same on every rank."""
        return self._state().to_tree()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, on any number of ranks.

        Raises RestoreError, and changes nothing, if the state belongs to another order of samples: other size, seed,
        batch size, sources or fingerprint, each named.
        """
        saved = LoaderState.from_tree(state)
        self._state().check_continues(saved)
        self._cursor = saved.cursor
        self._samples_seen, self._tokens_seen = saved.samples_seen, saved.tokens_seen
        self._order = saved.order()
        if isinstance(self.dataset, Mixture) and isinstance(self._order, Interleave):
            self.dataset.follow(self._order, self._change_weights)
        self._block = _Block()
        self._drop_fetched()

    def differences_from(self, state: Mapping[str, Any]) -> list[str]:
        """Why this loader cannot go on from ``state``, in words; empty where it can. For a restore, which has to know
        before it touches anything; the fingerprint is compared there, as a version of the data."""
        return self._state().differences_from(LoaderState.from_tree(state))

    def close(self) -> None:
        """Stop the worker processes. The loader can be used again; ``fetch`` starts new ones."""
        self._drop_fetched()

    @property
    def order(self) -> SampleOrder:
        """The global order, as it is known now (``loader_state.order_of`` gives it from a saved state)."""
        return self._order

    @property
    def cursor(self) -> int:
        """The first global position that was not consumed."""
        return self._cursor

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the cursor stands in (of a mixture: as if all sources were one)."""
        return self._cursor // self._size

    @property
    def samples_seen(self) -> int:
        """Samples consumed by all ranks since the beginning of the run."""
        return self._samples_seen

    @property
    def tokens_seen(self) -> int:
        """Tokens consumed by all ranks since the beginning of the run; 0 if the dataset does not count them."""
        return self._tokens_seen

    def _first_order(self) -> SampleOrder:
        if isinstance(self.dataset, Mixture):
            order = self.dataset.order(self.seed, self.shuffle)
            self.dataset.follow(order, self._change_weights)
            return order
        return Order(self._size, self.seed, self.shuffle, bool(getattr(self.dataset, "numbered_epochs", False)))

    def _change_weights(self, weights: tuple[float, ...]) -> None:
        delivered = self._cursor if self._current is None else self._current.step_stop
        assert isinstance(self._order, Interleave)
        self._order = self._order.changed(delivered, weights)
        self._block = _Block()
        self._drop_prefetched()

    def _state(self) -> LoaderState:
        mixture = None
        if isinstance(self.dataset, Mixture) and isinstance(self._order, Interleave):
            mixture = self.dataset.state(self._order, self._cursor)
        return LoaderState(
            cursor=self._cursor,
            samples_seen=self._samples_seen,
            tokens_seen=self._tokens_seen,
            seed=self.seed,
            shuffle=self.shuffle,
            size=self._size,
            numbered_epochs=bool(getattr(self.dataset, "numbered_epochs", False)),
            global_batch_size=self.global_batch_size,
            fingerprint=str(getattr(self.dataset, "fingerprint", "")),
            mixture=mixture,
        )

    def _drop_fetched(self) -> None:
        self._current = None
        self._drop_prefetched()

    def _drop_prefetched(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _step_stop(self, start: int) -> int:
        stop = start + self.global_batch_size
        return stop if self._end is None else min(stop, self._end)

    def _load(self, step_stop: int) -> _Current:
        step_samples = step_stop - self._cursor
        first, last = cut(step_samples, self._dp_rank, self._dp_size)
        step_ids, ids = self._ids_at(self._cursor, step_samples, first, last)
        # Only the short step at the end of finite data can leave a rank without a share: see Batch.
        wanted = ids if ids.size else self._order.ids(self._cursor, self._cursor + 1)
        data = self._collate(self._items(wanted)) if not self._num_workers else self._prefetched(wanted)
        weight = (last - first) * self._dp_size / step_samples
        if self._tokens_per_sample is not None:
            tokens, local = step_samples * self._tokens_per_sample, (last - first) * self._tokens_per_sample
            token_weight = None
        elif self._token_count is not None:
            tokens, local = int(self._token_count(step_ids)), int(self._token_count(ids)) if ids.size else 0
            token_weight = local * self._dp_size / tokens if tokens else None
        else:
            tokens, local, token_weight = 0, 0, None
        batch = Batch(data, ids, self._cursor + first, self._cursor + last, weight, token_weight)
        return _Current(batch, step_stop, tokens, local)

    def _ids_at(self, start: int, samples: int, first: int, last: int) -> tuple[Ids, Ids]:
        """Return (ids of the step, ids of this rank's share); the former only if tokens are counted by id."""
        if samples != self.global_batch_size:
            step_ids = self._order.ids(start, start + samples)
            return step_ids, step_ids[first:last]
        a, b = (0, samples) if self._token_count is not None else (first, last)
        row = self._block.row(self._order, start, samples, a, b)
        return row, row[first - a : last - a]

    def _items(self, ids: Ids) -> list[Any]:
        if self._get_many is not None:
            return list(self._get_many(ids.tolist()))
        dataset = self.dataset
        return [dataset[index] for index in ids.tolist()]

    def _prefetched(self, wanted: Ids) -> Any:
        if self._workers is None:
            self._workers = PrefetchedBatches(
                self.dataset,
                requests(self._order, self._cursor, self._end, self.global_batch_size, self._dp_rank, self._dp_size),
                seed=self.seed,
                num_workers=self._num_workers,
                prefetch=self._prefetch,
                collate_fn=self._collate,
                start_method=self._start_method,
            )
        return self._workers.next(wanted)


class _Current:
    """The batch that was delivered and not yet consumed, and what consuming it will count."""

    __slots__ = ("batch", "local_tokens", "step_stop", "step_tokens")

    def __init__(self, batch: Batch, step_stop: int, step_tokens: int, local_tokens: int) -> None:
        self.batch, self.step_stop = batch, step_stop
        self.step_tokens, self.local_tokens = step_tokens, local_tokens


class _Block:
    """The ids of many steps ahead, computed at once: the order costs 0.1 µs an id in blocks, 100 µs a call."""

    def __init__(self) -> None:
        self._start = self._stop = 0
        self._part = (0, 0)
        self._rows: Ids = np.empty((0, 0), dtype=np.int64)

    def row(self, order: SampleOrder, start: int, samples: int, first: int, last: int) -> Ids:
        """Return the ids at ``start + first`` to ``start + last``; the steps that follow have the same shape."""
        if not self._start <= start < self._stop or self._part != (first, last):
            steps = max(1, _BLOCK_IDS // (last - first))
            starts = start + samples * np.arange(steps, dtype=np.int64)
            self._rows = order.at(starts[:, None] + np.arange(first, last, dtype=np.int64)[None, :])
            self._start, self._stop, self._part = start, start + samples * steps, (first, last)
        ids: Ids = self._rows[(start - self._start) // samples]
        return ids


def _end_position(samples: int, global_batch_size: int, drop_last: bool) -> int:
    return samples - samples % global_batch_size if drop_last else samples


def _check_arguments(
    dataset: Any, global_batch_size: int, seed: int, epochs: int | None, num_workers: int, prefetch: int
) -> None:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError("dataset", type(dataset).__name__, "needs __len__ and __getitem__ (a map-style dataset)")
    if len(dataset) == 0:
        raise ConfigError("dataset", type(dataset).__name__, "is empty; check the path that it reads")
    if global_batch_size < 1:
        raise ConfigError("global_batch_size", global_batch_size, "must be at least 1")
    if epochs is not None and epochs < 1:
        raise ConfigError("epochs", epochs, "must be at least 1, or None for an endless run")
    if epochs is not None and isinstance(dataset, Mixture):
        raise ConfigError("epochs", epochs, "sources of a mixture end at different times; bound the run by its steps")
    if not -(2**63) <= int(seed) < 2**63:
        raise ConfigError("seed", seed, "must fit 64 bits")
    if num_workers < 0:
        raise ConfigError("num_workers", num_workers, "must be 0 (fetch in the training thread) or more")
    if prefetch < 1:
        raise ConfigError("prefetch", prefetch, "must be at least 1 batch for each worker")
