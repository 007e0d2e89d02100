"""Several datasets as one, drawn by weights that may change while the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from elastic.data.interleave import Interleave, check_weights
from elastic.data.loader_state import MixtureState
from elastic.data.order import Ids
from elastic.errors import ConfigError

__all__ = ["Mixture"]


class Mixture:
    """A map-style dataset over named sources. The loader draws from each in proportion to its weight.

    ``Mixture({"code": a, "prose": b}, weights={"code": 3, "prose": 1})``: of any stretch of the run, three quarters
    are code, to within a few samples; each source goes through its own epochs, shuffled, at its own pace. A sample of
    source ``k`` of ``n`` with the index ``i`` has the id ``i * n + k``.

    ``set_weights`` takes effect from the next step that was not yet delivered, and must be called alike on all ranks
    (as a function of the step, say). The history of weights is part of the loader's state; a restored run goes on
    with the weights that it had, whatever the constructor says.

    Raises ConfigError for no source, an empty one, a mixture inside a mixture, or weights that cannot be used.
    """

    def __init__(self, sources: Mapping[str, Any], *, weights: Mapping[str, float]) -> None:
        if not sources:
            raise ConfigError("sources", {}, "a mixture needs at least one dataset")
        for name, source in sources.items():
            if isinstance(source, Mixture):
                raise ConfigError("sources", name, "a mixture cannot hold a mixture; list its sources here instead")
            if len(source) == 0:
                raise ConfigError("sources", name, "the dataset is empty; leave it out")
        self.names = tuple(sources)
        self._sources = tuple(sources.values())
        self._weights = check_weights(self.names, weights)
        self._on_change: Callable[[tuple[float, ...]], None] | None = None

    @property
    def weights(self) -> dict[str, float]:
        """The weights that the next undelivered step is drawn with."""
        return dict(zip(self.names, self._weights, strict=True))

    @property
    def fingerprint(self) -> str:
        """The sources' fingerprints, or "" if one has none."""
        prints = [str(getattr(source, "fingerprint", "")) for source in self._sources]
        return "+".join(prints) if all(prints) else ""

    @property
    def counts_tokens(self) -> bool:
        return all(hasattr(source, "token_count") for source in self._sources)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Draw with ``weights`` from the next step that was not yet delivered.

        Raises ConfigError if they do not name exactly the sources, or cannot be used.
        """
        self._weights = check_weights(self.names, weights)
        if self._on_change is not None:
            self._on_change(self._weights)

    def order(self, seed: int, shuffle: bool) -> Interleave:
        """Return the order that begins with the present weights."""
        return Interleave(
            sizes=tuple(len(source) for source in self._sources),
            seed=seed,
            shuffle=shuffle,
            numbered_epochs=tuple(bool(getattr(source, "numbered_epochs", False)) for source in self._sources),
            history=((0, self._weights),),
        )

    def follow(self, order: Interleave, on_change: Callable[[tuple[float, ...]], None]) -> None:
        """Take the weights of ``order`` and tell its owner, by ``on_change``, when they are to change."""
        self._weights = order.history[-1][1]
        self._on_change = on_change

    def state(self, order: Interleave, cursor: int) -> MixtureState:
        """Return what a snapshot keeps of ``order`` at ``cursor``."""
        return MixtureState(
            names=self.names,
            sizes=order.sizes,
            numbered_epochs=order.numbered_epochs,
            history=order.history,
            counts=tuple(order.counts(cursor).tolist()),
        )

    def source_of(self, index: int) -> tuple[str, int]:
        """Return the name of the source that holds the sample with id ``index``, and its index there."""
        inner, source = divmod(int(index), len(self._sources))
        return self.names[source], inner

    def token_count(self, ids: Ids) -> int:
        """Return how many tokens the samples hold. Call it only if ``counts_tokens``."""
        inner, number = np.divmod(ids, len(self._sources))
        return sum(int(source.token_count(inner[number == k])) for k, source in enumerate(self._sources))

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources)

    def __getitem__(self, index: int) -> Any:
        inner, source = divmod(int(index), len(self._sources))
        return self._sources[source][inner]

    def __getstate__(self) -> dict[str, Any]:
        # The callback leads to the loader, which stays with the rank; loader processes need only the sources.
        return {**self.__dict__, "_on_change": None}
