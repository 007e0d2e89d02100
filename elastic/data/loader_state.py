"""What a snapshot keeps of a loader, and the order that it stands for.

Pure, so that the audit can rebuild the order of a run from its snapshot without the dataset. All counts are global:
the same on every rank, and of any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic.data.interleave import Interleave
from elastic.data.order import Order, SampleOrder
from elastic.errors import RestoreError

__all__ = ["SCHEMA_VERSION", "LoaderState", "MixtureState", "order_of"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class MixtureState:
    """The sources of a mixture, every change of their weights, and how much each has given so far (``counts``)."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    numbered_epochs: tuple[bool, ...]
    history: tuple[tuple[int, tuple[float, ...]], ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoaderState:
    """A loader at a boundary between two steps. ``cursor`` is the first global position that was not consumed."""

    cursor: int
    samples_seen: int
    tokens_seen: int
    seed: int
    shuffle: bool
    size: int
    numbered_epochs: bool
    global_batch_size: int
    fingerprint: str
    mixture: MixtureState | None = None

    def order(self) -> SampleOrder:
        """Return the global order of the run that this state belongs to."""
        if self.mixture is None:
            return Order(self.size, self.seed, self.shuffle, self.numbered_epochs)
        mixture = self.mixture
        return Interleave(mixture.sizes, self.seed, self.shuffle, mixture.numbered_epochs, mixture.history)

    def to_tree(self) -> dict[str, Any]:
        """Return a tree of dicts, lists, strings and numbers that JSON can hold."""
        mixture = self.mixture
        return {
            "schema_version": SCHEMA_VERSION,
            "cursor": self.cursor,
            "epoch": self.cursor // self.size,
            "samples_seen": self.samples_seen,
            "tokens_seen": self.tokens_seen,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "size": self.size,
            "numbered_epochs": self.numbered_epochs,
            "global_batch_size": self.global_batch_size,
            "fingerprint": self.fingerprint,
            "mixture": mixture
            and {
                "names": list(mixture.names),
                "sizes": list(mixture.sizes),
                "numbered_epochs": list(mixture.numbered_epochs),
                "history": [[position, list(weights)] for position, weights in mixture.history],
                "counts": list(mixture.counts),
            },
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> LoaderState:
        """Return the state that ``to_tree`` wrote.

        Raises RestoreError if it is of another schema version or is not such a tree.
        """
        version = tree.get("schema_version") if isinstance(tree, Mapping) else None
        if version != SCHEMA_VERSION:
            raise RestoreError(
                f"the loader's state has schema version {version!r}, this release reads {SCHEMA_VERSION}",
                "loader",
                "restore it with the release that wrote it",
            )
        try:
            mixture = tree["mixture"]
            return LoaderState(
                cursor=int(tree["cursor"]),
                samples_seen=int(tree["samples_seen"]),
                tokens_seen=int(tree["tokens_seen"]),
                seed=int(tree["seed"]),
                shuffle=bool(tree["shuffle"]),
                size=int(tree["size"]),
                numbered_epochs=bool(tree["numbered_epochs"]),
                global_batch_size=int(tree["global_batch_size"]),
                fingerprint=str(tree["fingerprint"]),
                mixture=mixture
                and MixtureState(
                    names=tuple(str(name) for name in mixture["names"]),
                    sizes=tuple(int(size) for size in mixture["sizes"]),
                    numbered_epochs=tuple(bool(numbered) for numbered in mixture["numbered_epochs"]),
                    history=tuple((int(at), tuple(float(w) for w in weights)) for at, weights in mixture["history"]),
                    counts=tuple(int(count) for count in mixture["counts"]),
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RestoreError(
                f"the loader's state cannot be read ({type(error).__name__}: {error})",
                "loader",
                "restore an older snapshot",
            ) from error

    def differences_from(self, saved: LoaderState) -> list[str]:
        """Every field that makes this loader's order another one than the saved one's, with both values; all but the
        fingerprint, which is a version of the data."""
        fields = ["size", "seed", "shuffle", "global_batch_size", "numbered_epochs"]
        pairs = [(name, getattr(saved, name), getattr(self, name)) for name in fields]
        mine, theirs = self.mixture, saved.mixture
        pairs += [
            (f"mixture {name}", theirs and getattr(theirs, name), mine and getattr(mine, name))
            for name in ("names", "sizes", "numbered_epochs")
        ]
        return [f"{name} is {here!r}, was {there!r}" for name, there, here in pairs if here != there]

    def check_continues(self, saved: LoaderState) -> None:
        """Refuse to go on from ``saved`` with this loader if its order would not be the saved one's.

        Raises RestoreError that names every field that differs, with both values. Fingerprints are compared only
        if both datasets have one.
        """
        differing = self.differences_from(saved)
        if self.fingerprint and saved.fingerprint and self.fingerprint != saved.fingerprint:
            differing.append(f"fingerprint is {self.fingerprint!r}, was {saved.fingerprint!r}")
        if differing:
            raise RestoreError(
                f"the loader's state belongs to another order of samples: {'; '.join(differing)}",
                "loader",
                "give the loader what it was saved with, or leave it out of attach() to begin the data anew",
            )


def order_of(tree: Mapping[str, Any]) -> SampleOrder:
    """Return the global order of a run from the state tree of its loader, for the audit."""
    return LoaderState.from_tree(tree).order()
