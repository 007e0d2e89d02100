"""The audit of a run from what lies in storage: clean when it is, and loud when it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.made_snapshots import RUN, SnapshotMaker

from elastic.data.ledger import LedgerRow, digest_of, encode_row
from elastic.data.loader_state import LoaderState
from elastic.data.order import Order, cut
from elastic.errors import ClusterError
from elastic.journal import encode, segment_key
from elastic.observe.audit import audit_run
from elastic.protocol.shares import StagedShare
from elastic.snapshot.tree import encode as encode_tree
from elastic.storage.memory_blobs import MemoryBlobs

SIZE, BATCH, STEPS, SEED = 40, 7, 6, 3


class LoaderMaker(SnapshotMaker):
    """Snapshots whose objects hold a loader, under a name of the user's choice."""

    loader = True

    def stage(self, step: int, *arguments: Any) -> StagedShare:
        state = LoaderState(step * BATCH, step * BATCH, 0, SEED, True, SIZE, False, BATCH, "").to_tree()
        components = {"text": {"kind": "loader", "state": state}} if self.loader else {"model": {"kind": "model"}}
        tree = encode_tree({"components": components, "extra": {}})
        return replace(super().stage(step, *arguments), objects=tree)


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[LoaderMaker]:
    made = LoaderMaker(tmp_path / "arena", mesh={"dp": 2})
    yield made
    made.close()


def row(generation: int, step: int, rank: int, ranks: int, shift: int = 0) -> LedgerRow:
    first, last = cut(BATCH, rank, ranks)
    start, stop = step * BATCH + first + shift, step * BATCH + last + shift
    return LedgerRow(generation, step, rank, ranks, start, stop, digest_of(Order(SIZE, SEED).ids(start, stop)))


def trajectory() -> list[LedgerRow]:
    """Three steps on two ranks, then on three; one step of the first generation was done again."""
    first = [row(1, step, rank, 2) for step in range(4) for rank in range(2)]
    return first + [row(2, step, rank, 3) for step in range(3, STEPS) for rank in range(3)]


def stored(maker: LoaderMaker, rows: list[LedgerRow]) -> MemoryBlobs:
    store = MemoryBlobs()
    maker.commit(store, step=STEPS, generation=2)
    begun = [{"kind": "begun", "t": float(n), "generation": n} for n in (1, 2)]
    committed = {"kind": "committed", "t": 3.0, "ledger": [encode_row(r) for r in rows]}
    store.put(segment_key(RUN, "c1-a", 0), encode([*begun, committed, committed]))
    return store


def test_a_run_that_took_every_sample_once_is_clean(maker: LoaderMaker) -> None:
    beyond = [row(2, STEPS, rank, 3) for rank in range(3)]  # in node memory only: no durable snapshot covers it
    found = audit_run(stored(maker, trajectory() + beyond), RUN)
    assert found is not None
    assert found.clean, found.audit.faults
    assert (found.step, found.audit.samples, found.audit.redone_steps) == (STEPS, STEPS * BATCH, 1)
    assert found.to_json()["repeated"] == found.to_json()["skipped"] == 0


@pytest.mark.parametrize(
    ("harm", "repeated", "skipped"),
    [
        (lambda rows: [r for r in rows if (r.generation, r.step, r.rank) != (2, 4, 1)], 0, 2),
        (lambda rows: [r if (r.generation, r.step, r.rank) != (2, 4, 1) else row(2, 4, 1, 3, -1) for r in rows], 1, 1),
        (lambda rows: [r if r.step != 5 else replace(r, digest="0" * 16) for r in rows], 0, 0),
    ],
    ids=["a row is missing", "a rank read one too early", "other samples were delivered"],
)
def test_whatever_went_wrong_is_found(
    maker: LoaderMaker, harm: Callable[[list[LedgerRow]], list[LedgerRow]], repeated: int, skipped: int
) -> None:
    found = audit_run(stored(maker, harm(trajectory())), RUN)
    assert found is not None
    assert not found.clean
    assert (found.audit.repeated, found.audit.skipped) == (repeated, skipped)


def test_without_a_loader_there_is_nothing_to_audit(maker: LoaderMaker) -> None:
    maker.loader = False
    assert audit_run(stored(maker, []), RUN) is None


def test_without_a_durable_snapshot_nothing_can_be_audited() -> None:
    with pytest.raises(ClusterError, match="has no durable snapshot"):
        audit_run(MemoryBlobs(), RUN)
