"""What a rank is told of a generation, what a run needs of the process around it, how it takes up a snapshot."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elastic.config import RestoreConfig
from elastic.errors import ConfigError
from elastic.mesh import Mesh
from elastic.protocol.shares import StagedShare
from elastic.snapshot.capture import Attached
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.made_with import installed
from elastic.snapshot.restore import ChunkSource, RestoreReport, restore

BUILD_STEP = -1
"""The "step" that seeds the generators while the model is built: the same on all ranks, unlike every real step."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What one rank is told of a generation."""

    name: str
    generation: int
    rank: int
    mesh: Mesh
    seed: int = 0
    rng: str = "derived"
    rng_on_resize: str = "refuse"
    hold: bool = False
    """Wait at the first boundary for the snapshot of step 0."""
    kept: MutableMapping[str, Any] = field(default_factory=dict)
    """What ``Run.keep`` holds over generations: the process's own."""
    restore: RestoreConfig | None = None
    """How to take up what was committed before the run was started; None for what it committed itself: strictly."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """What only the driver knows of the versions that snapshots are made with."""
    from_other_run: bool = False
    """What is restored is a snapshot of another run, so that steps may count from 0."""


class RunLink(Protocol):
    """What a run needs of the process around it. Called from the train thread; must not block on the controller."""

    def restore_source(self) -> tuple[SnapshotIndex, ChunkSource, str] | None:
        """The snapshot to restore from, how to read it and the tier's name; None for a fresh start."""

    def formed_state(self, share_bytes: int, step: int) -> None:
        """The rank stands at its first boundary."""

    def first_step(self, step: int) -> None:
        """The first step of the generation is done."""

    def doubtful(self, step: int) -> None:
        """The turn after ``step`` ended without a step of an optimizer: are all ranks still there?"""

    def at_end(self, step: int) -> None:
        """The last step is done; the rank waits for the last snapshot."""

    def staged(self, share: StagedShare) -> None:
        """A share lies in its slot, complete."""

    def stage_failed(self, attempt: str, reason: str) -> None:
        """A share will not come."""

    def restored(self, report: RestoreReport) -> None:
        """The state was restored."""


def take_up(
    context: RunContext, attached: Attached, index: SnapshotIndex, source: ChunkSource, tier: str, dataset: object
) -> RestoreReport:
    """Restore what is attached as the generation was told to. ``dataset`` is the one at hand, whose version counts.

    Raises ConfigError if saved generators meet another mesh, else as ``restore``.
    """
    if context.rng == "saved" and index.mesh != context.mesh and context.rng_on_resize != "derive":
        raise ConfigError(
            "rng",
            "saved",
            f"the snapshot has generator states of {index.mesh}, and this is {context.mesh}: use "
            "rng_on_resize='derive', or rng='derived'",
        )
    how, versions = context.restore, None
    if how is None:
        how = RestoreConfig()  # what this run committed itself, with the very same versions
    else:
        given = {name: text for name, text in context.versions.items() if text}
        versions = {**installed(), "data": str(getattr(dataset, "fingerprint", "")), **given}
        # Imported weights are all that their snapshot has: a warm start, told as such.
        if index.manifest and not any(index.manifest["has"].values()):
            how = how.model_copy(update={"mode": "weights"})
    return replace(restore(attached, index, source, how, versions=versions, live=tier == "live"), tier=tier)
