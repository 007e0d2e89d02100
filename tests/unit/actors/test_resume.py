"""What a run begins with: its own snapshots, or one of another run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.made_snapshots import RUN, SnapshotMaker

from actors.resume import how_to_restore, start_of, what_is_durable
from elastic.config import RestoreConfig, RunConfig
from elastic.errors import ConfigError
from elastic.protocol.tiers import NodeSnapshot, RemoteSnapshot, RestoreOrder, newest_restorable
from elastic.storage.memory_blobs import MemoryBlobs


@pytest.fixture
def store(tmp_path: Path) -> MemoryBlobs:
    store, maker = MemoryBlobs(), SnapshotMaker(tmp_path / "arena")
    for step in (10, 20):
        maker.commit(store, step)
    maker.close()
    return store


def test_weights_of_another_run_stand_for_step_0_and_everything_else_goes_on_counting(store: MemoryBlobs) -> None:
    assert start_of(RUN, "weights", store, "new").step == 0
    assert start_of(RUN, "training", store, "new").step == 20
    assert start_of(f"{RUN}@10", "strict", store, "new").step == 10


@pytest.mark.parametrize(
    ("start", "cure"),
    [
        (f"{RUN}@15", "run 'a-run' has no snapshot '15'"),
        ("b-run", "run 'b-run' has no snapshot in"),
        ("new", "is this run itself"),
    ],
)
def test_a_start_that_is_not_there_is_refused_by_name(store: MemoryBlobs, start: str, cure: str) -> None:
    with pytest.raises(ConfigError, match="start_from") as caught:
        start_of(start, "strict", store, "new")
    assert cure in str(caught.value)


def test_what_the_run_commits_itself_beats_the_snapshot_it_began_with(store: MemoryBlobs) -> None:
    start = start_of(RUN, "weights", store, "new")
    own = NodeSnapshot("g1-a", 0, {0: ("n",)})
    assert newest_restorable((), (start,)) == RestoreOrder(0, None, start, "no snapshot is in node memory")
    order = newest_restorable((own,), (start,))
    assert order is not None
    assert order.attempt == "g1-a"
    assert newest_restorable((), (RemoteSnapshot("g1-a", 0), start)).attempt == "g1-a"  # type: ignore[union-attr]


def test_the_configured_mode_is_for_what_was_there_before_and_never_for_a_recovery(store: MemoryBlobs) -> None:
    config = RunConfig(name="new", storage_path="/x", restore="training")
    (newest, *_) = what_is_durable(store, RUN).snapshots
    resumed = RestoreOrder(20, None, newest, "")
    own = RestoreOrder(30, None, RemoteSnapshot("g2-a", 30), "")
    live = RestoreOrder(31, NodeSnapshot("g2-b", 31, {0: ("n",)}, live=True), None, "")
    assert how_to_restore(config, resumed) == RestoreConfig(mode="training")
    assert how_to_restore(config, own) is how_to_restore(config, live) is how_to_restore(config, None) is None


def test_with_start_from_the_same_command_again_resumes_strictly(store: MemoryBlobs) -> None:
    how = RestoreConfig(mode="weights", accept_versions=("code",))
    config = RunConfig(name="new", storage_path="/x", restore=how, start_from=RUN)
    begun = RestoreOrder(0, None, start_of(RUN, "weights", store, "new"), "")
    again = RestoreOrder(20, None, RemoteSnapshot("g2-a", 20, earlier=True), "")
    assert how_to_restore(config, begun) == how
    assert how_to_restore(config, again) == RestoreConfig(accept_versions=("code",))
