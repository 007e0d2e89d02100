"""Batches fetched ahead of the cursor by worker processes: what they are asked, what runs in them, how they start."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import pickle
import queue
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

from elastic.data.order import Ids, SampleOrder, cut, derive_seed
from elastic.errors import ConfigError, InternalError

__all__ = ["PrefetchedBatches", "requests"]

_RECEIVED_AHEAD = 2
_LONGEST_WAIT_S = 1.0
_Received: TypeAlias = "tuple[Any, BaseException | None]"


def requests(
    order: SampleOrder, start: int, end: int | None, global_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[list[int]]:
    """Yield, for each step from ``start`` on, what a worker is to fetch: its first position, then the ids."""
    while end is None or start < end:
        stop = start + global_batch_size if end is None else min(start + global_batch_size, end)
        first, last = cut(stop - start, dp_rank, dp_size)
        if first == last:  # a stand-in, see Batch
            first, last = 0, 1
        yield [start + first, *order.ids(start + first, start + last).tolist()]
        start = stop


class PrefetchedBatches:
    """Collated batches on their way from worker processes, in the order of the requests.

    A thread takes them off the workers' queue: unpacking shared memory costs a millisecond a batch (m), which is thus
    spent beside the step and not before it. ``close``, or dropping the object, stops the thread and the workers.
    """

    def __init__(
        self,
        dataset: Any,
        wanted: Iterator[list[int]],
        *,
        seed: int,
        num_workers: int,
        prefetch: int,
        collate_fn: Callable[[list[Any]], Any],
        start_method: str | None,
    ) -> None:
        self._asked: deque[list[int]] = deque()
        generator = torch.Generator()  # its own: starting workers must not move the generator of the training
        generator.manual_seed(derive_seed(seed))
        source: Any = _WorkerDataset(dataset, seed)
        batches = iter(
            DataLoader(
                source,
                batch_sampler=_Remembered(wanted, self._asked),
                num_workers=num_workers,
                prefetch_factor=prefetch,
                collate_fn=collate_fn,
                multiprocessing_context=_worker_context(start_method, dataset, collate_fn),
                generator=generator,
            )
        )
        self._ready: queue.Queue[_Received] = queue.Queue(maxsize=_RECEIVED_AHEAD)
        self._failed: BaseException | None = None
        stopped = threading.Event()
        # The thread alone holds the iterator, and nothing of this object: when it ends, the workers do.
        self._thread = threading.Thread(
            target=_receive, args=(batches, self._ready, stopped), name="elastic-prefetch", daemon=True
        )
        self._stop = weakref.finalize(self, _stop, self._ready, stopped)
        self._thread.start()

    def next(self, ids: Ids) -> Any:
        """Return the data of the next request, which must be for ``ids``."""
        if self._failed is None:
            data, self._failed = self._ready.get()
        if self._failed is not None:
            raise self._failed
        asked = self._asked.popleft()[1:]
        if asked != ids.tolist():
            raise InternalError("a prefetched batch does not belong to the cursor", (f"asked {asked}", f"want {ids}"))
        return data

    def close(self) -> None:
        """Stop the workers; wait for them a second at most, since one may be deep in the user's code."""
        self._stop()
        self._thread.join(timeout=_LONGEST_WAIT_S)


def _receive(batches: Iterator[Any], ready: queue.Queue[_Received], stopped: threading.Event) -> None:
    try:
        while not stopped.is_set():
            ready.put((next(batches), None))
    except StopIteration:
        pass
    except BaseException as error:
        if not stopped.is_set():
            # Its text holds the worker's traceback. Our own frames would keep the workers alive as long as the error.
            ready.put((None, error.with_traceback(None)))


def _stop(ready: queue.Queue[_Received], stopped: threading.Event) -> None:
    stopped.set()
    with contextlib.suppress(queue.Empty):
        while True:  # whoever waits to put gets room, sees that it is stopped, and ends
            ready.get_nowait()


class _Remembered:
    """The requests, each noted when it is handed out: batches come back without their ids, but in order."""

    def __init__(self, wanted: Iterator[list[int]], asked: deque[list[int]]) -> None:
        self._wanted, self._asked = wanted, asked

    def __iter__(self) -> Iterator[list[int]]:
        for request in self._wanted:
            self._asked.append(request)
            yield request


class _WorkerDataset:
    """Draws samples under generators seeded from (seed, position), whichever worker of whichever rank it is."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, request: list[int]) -> list[Any]:
        """Return the samples of ``request``: the global position of the first, then the ids."""
        position, ids = request[0], request[1:]
        get_many = getattr(self._dataset, "__getitems__", None)
        if get_many is not None:
            _seed_generators(derive_seed(self._seed, position))
            return list(get_many(ids))
        samples = []
        for number, index in enumerate(ids):
            _seed_generators(derive_seed(self._seed, position + number))
            samples.append(self._dataset[index])
        return samples

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not torch.manual_seed: it also queues a call for every accelerator, which these processes never use.
    torch.default_generator.manual_seed(seed)


def _worker_context(name: str | None, dataset: Any, collate_fn: Any) -> multiprocessing.context.BaseContext:
    """Return the context that starts the worker processes: a fork server unless ``name`` says otherwise.

    A rank has threads that hold locks, so a plain fork may hang. The server imports torch once and survives the
    generations of its rank: a worker costs a fork, not an import.

    Raises ConfigError if the method does not exist here, or the dataset cannot be pickled for it.
    """
    methods = multiprocessing.get_all_start_methods()
    chosen = name or ("forkserver" if "forkserver" in methods else "spawn")
    if chosen not in methods:
        raise ConfigError("multiprocessing_context", name, f"this system knows {', '.join(methods)}")
    context = multiprocessing.get_context(chosen)
    if chosen == "forkserver":
        # Without effect once the server runs; __main__ is what it imports by itself.
        context.set_forkserver_preload(["__main__", "torch", "elastic.data.prefetch"])
    if chosen != "fork":
        _check_portable("dataset", dataset)
        _check_portable("collate_fn", collate_fn)
    return context


def _check_portable(argument: str, value: Any) -> None:
    try:
        pickle.Pickler(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            argument,
            type(value).__name__,
            f"cannot be sent to loader processes ({error}); define it at the top of a module that can be imported "
            'there, or use num_workers=0, or multiprocessing_context="fork" at the risk of a hang',
        ) from error


class _Nowhere:
    """A file that forgets: pickling is only tried."""

    def write(self, data: Any) -> int:
        return len(data)
