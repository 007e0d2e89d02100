"""Which attempts a node holds parts of, and in which slots: the bookkeeping of the node tier, without any bytes.

A share is opened (its slot is given to a rank), then held (sealed here or sent by a peer); an attempt is committed or
given up. A name that was given up or replaced is never used again: what arrives late under it is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.errors import CommitRefused, SnapshotError
from elastic.protocol.shares import SlotRef
from elastic.snapshot.arena import ArenaPool
from elastic.snapshot.held_share import HeldShare
from elastic.snapshot.object_names import check_part

REMEMBERED_NAMES = 10_000


@dataclass(slots=True)
class _Attempt:
    slots: dict[int, SlotRef] = field(default_factory=dict)
    """Slots of shares that are opened and not yet sealed."""
    replicas: dict[int, SlotRef] = field(default_factory=dict)
    """Slots kept for shares that peers will send."""
    shares: dict[int, HeldShare] = field(default_factory=dict)

    def all_slots(self) -> list[SlotRef]:
        return [*self.slots.values(), *self.replicas.values(), *(share.slot for share in self.shares.values())]


class AttemptBook:
    """Thread-safe. At most one attempt is the committed one; its shares alone are readable."""

    def __init__(self, arena: ArenaPool) -> None:
        self._arena = arena
        self._attempts: dict[str, _Attempt] = {}
        self._closed: dict[str, None] = {}
        self._committed: str | None = None
        self._lock = threading.RLock()

    # ---- making

    def open(self, attempt: str, shares: Mapping[int, int], replicas: Mapping[int, int]) -> dict[int, SlotRef] | None:
        """See ``NodeTier.open_attempt``."""
        check_part(attempt)
        with self._lock:
            self._refuse_closed(attempt)
            if (known := self._attempts.get(attempt)) is not None:
                return {rank: known.slots[rank] if rank in known.slots else known.shares[rank].slot for rank in shares}
        opened = _Attempt()
        for wanted, slots in ((shares, opened.slots), (replicas, opened.replicas)):
            for rank, nbytes in wanted.items():
                slot = self._arena.take(nbytes)
                if slot is None:
                    self._release(opened)
                    return None
                slots[rank] = slot
        with self._lock:
            if attempt in self._closed or attempt in self._attempts:
                self._release(opened)
                raise SnapshotError("the attempt was opened twice or given up meanwhile", f"attempt {attempt}")
            self._attempts[attempt] = opened
        return dict(opened.slots)

    def check_open(self, attempt: str, rank: int, slot: SlotRef) -> None:
        """Raise SnapshotError unless ``slot`` is the one that ``rank`` may hand over for this attempt."""
        with self._lock:
            opened = self._attempts.get(attempt)
            if opened is None or opened.slots.get(rank) != slot:
                raise SnapshotError(
                    f"the share of rank {rank} came after its attempt was given up", f"attempt {attempt}"
                )

    def hold(self, share: HeldShare) -> None:
        """Turn the opened slot of a share into a held one. Raises SnapshotError if it is not open any more."""
        attempt, rank = share.header.attempt, share.header.rank
        with self._lock:
            self.check_open(attempt, rank, share.slot)
            del self._attempts[attempt].slots[rank]
            self._attempts[attempt].shares[rank] = share

    def take_for_replica(self, attempt: str, rank: int, nbytes: int) -> SlotRef:
        """A slot for a peer's share: the one kept for it, or a free one. Raises SnapshotError if there is none."""
        check_part(attempt)
        with self._lock:
            self._refuse_closed(attempt)
            entry = self._attempts.setdefault(attempt, _Attempt())
            kept = entry.replicas.get(rank)
            if kept is not None and kept.capacity_bytes >= nbytes:
                return entry.replicas.pop(rank)
        slot = self._arena.take(nbytes)
        if slot is None:
            where = str(self._arena.directory)
            raise SnapshotError(f"no free arena slot for the replica of rank {rank}", where, "reserve more replicas")
        return slot

    def hold_replica(self, share: HeldShare) -> None:
        """Hold a peer's share; one that is held already is replaced. Raises SnapshotError if the attempt was given up:
        the slot is then released."""
        attempt, rank = share.header.attempt, share.header.rank
        with self._lock:
            entry = self._attempts.get(attempt)
            if entry is None:
                self._arena.release(share.slot)
                raise SnapshotError("the attempt was given up", f"attempt {attempt}")
            if (former := entry.shares.get(rank)) is not None:
                self._arena.release(former.slot)
            entry.shares[rank] = share

    def commit(self, attempt: str) -> None:
        """See ``NodeTier.commit``."""
        with self._lock:
            if attempt == self._committed:
                return
            self._refuse_closed(attempt)
            entry = self._attempts.get(attempt)
            if entry is not None and entry.slots:
                raise CommitRefused(f"ranks {sorted(entry.slots)} are not sealed on this node", f"attempt {attempt}")
            former, self._committed = self._committed, attempt
            if entry is not None:
                for slot in entry.replicas.values():
                    self._arena.release(slot)
                entry.replicas.clear()
            if former is not None:
                self._close(former)

    def abandon(self, attempt: str, ranks_quiet: bool) -> None:
        """See ``NodeTier.abandon``."""
        with self._lock:
            if attempt == self._committed:
                return
            entry = self._attempts.get(attempt)
            dirty = [] if ranks_quiet or entry is None else list(entry.slots.values())
            if entry is not None and dirty:
                entry.slots.clear()
            self._close(attempt)
        for slot in dirty:
            self._arena.renew(slot)

    def clear(self) -> None:
        """Forget everything; the arena is closed next."""
        with self._lock:
            self._attempts.clear()
            self._committed = None

    # ---- what is held

    @property
    def committed(self) -> str | None:
        return self._committed

    def names(self, *, committed: bool) -> dict[str, set[int]]:
        """Ranks whose shares are held, of the committed attempt or of all others."""
        with self._lock:
            return {name: set(e.shares) for name, e in self._attempts.items() if (name == self._committed) == committed}

    def shares(self, attempt: str) -> dict[int, HeldShare]:
        """The held shares of any attempt, readable or not."""
        with self._lock:
            return dict(self._attempts[attempt].shares) if attempt in self._attempts else {}

    def readable(self, attempt: str) -> dict[int, HeldShare]:
        """The held shares if ``attempt`` is the committed one, else none."""
        with self._lock:
            return self.shares(attempt) if attempt == self._committed else {}

    def pin(self, attempt: str) -> dict[int, HeldShare]:
        """The held shares, with one more user of each slot."""
        with self._lock:
            found = self.shares(attempt)
            for share in found.values():
                self._arena.hold(share.slot)
            return found

    def _refuse_closed(self, attempt: str) -> None:
        if attempt in self._closed:
            raise SnapshotError("the attempt was given up", f"attempt {attempt}", "a retry needs a new name")

    def _close(self, attempt: str) -> None:
        if (entry := self._attempts.pop(attempt, None)) is not None:
            self._release(entry)
        self._closed[attempt] = None
        while len(self._closed) > REMEMBERED_NAMES:
            del self._closed[next(iter(self._closed))]

    def _release(self, entry: _Attempt) -> None:
        for slot in entry.all_slots():
            self._arena.release(slot)
