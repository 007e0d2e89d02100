"""What passes between a rank, its node's store and the controller while a snapshot is made. Plain data, no I/O.

A rank stages its *share* into an arena slot and hands the store a ``StagedShare``. The store hashes it, makes the
chunk table and answers with a ``SealedShare``; the bytes stay where they are. Peers and the durable tier copy sealed
shares. The controller sees only ``ShareReport``: digests and counts, nothing that grows with the number of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CHUNK_BYTES = 4 << 20
"""Most bytes of a chunk: the unit of checking, dedupe and reading."""

ALIGNMENT_BYTES = 64
"""Pieces begin at multiples of this in an arena and in a pack, so that a map of them serves every dtype."""


@dataclass(frozen=True, slots=True)
class PointInTime:
    """What must be equal on all ranks for their shares to be one snapshot: the moment, told in several ways."""

    generation: int
    step: int
    data_cursor: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    optimizer_steps: tuple[tuple[str, int], ...] = ()
    scheduler_steps: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a rank planned its share from, for a group of tensors: all its holders must say the same.

    ``held_at`` names the group's coordinates (empty: all ranks), ``holders`` is how many ranks those are, ``told``
    begins with the first tensor's name and ends in a digest of names, dtypes, shapes and cuts.
    """

    held_at: str
    part: int
    holders: int
    told: str


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A place in node memory for one share: a file that the store made, sized and touched, and the rank maps."""

    path: str
    capacity_bytes: int
    slot: int


@dataclass(frozen=True, slots=True)
class StagedShare:
    """One rank's share of an attempt, copied into ``slot``. The rank will not touch the slot again."""

    attempt: str
    rank: int
    world_size: int
    mesh: tuple[tuple[str, int], ...]
    point: PointInTime
    slot: SlotRef
    used_bytes: int
    plan_key: str
    """Names the table of pieces; the same key always means the same table."""
    plan: bytes | None
    """The table of pieces (see save_plan), or None where the store was given it before under ``plan_key``."""
    objects: bytes
    """Everything attached that is not a tensor: canonical JSON (see tree)."""
    ledger: tuple[str, ...] = ()
    """Encoded ledger rows since this rank's previous snapshot."""
    stall_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    """Where the stall went: capture, plan, copy."""
    agreements: tuple[Agreement, ...] = ()


@dataclass(frozen=True, slots=True)
class ShareReport:
    """What the controller learns of a sealed share: enough to commit or refuse, independent of its size."""

    attempt: str
    rank: int
    point: PointInTime
    nbytes: int
    digest: str
    """Digest over chunk table and objects: names the content of the share."""
    stall_s: float
    drain_s: dict[str, float]
    """Where the background work went: hash, replicate."""
    ledger: tuple[str, ...] = ()
    stall_parts_s: dict[str, float] = field(default_factory=dict)
    """Where the stall went: capture, plan, copy."""
    agreements: tuple[Agreement, ...] = ()
