"""State that differs between ranks: own on the same mesh, by coordinate or by rule on another, never one for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.simulated_ranks import take_snapshot
from torch import nn

from elastic import per_rank
from elastic.errors import CaptureError, CommitRefused, RestoreError, TopologyMismatch
from elastic.mesh import Mesh
from elastic.snapshot.capture import Attached
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.restore import restore

DP2_TP2 = Mesh((("dp", 2), ("tp", 2)))
DP4_TP2 = Mesh((("dp", 4), ("tp", 2)))
TP4 = Mesh((("tp", 4),))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NodeTier]:
    tier = NodeTier(tmp_path / "arena")
    yield tier
    tier.close()


class Holder:
    """A loader's worker, a replay buffer: whatever a rank keeps for itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def ranks(mesh: Mesh, value: Any, wrap: Any = lambda holder: holder) -> list[Attached]:
    model = nn.Linear(2, 2)
    found = []
    for rank in range(mesh.world_size):
        holder = Holder(value(mesh.coordinate(rank)) if callable(value) else value)
        found.append(Attached({"model": model, "holder": wrap(holder)}, mesh, rank))
    return found


def restored(mesh: Mesh, rank: int, index: Any, source: Any, wrap: Any = lambda holder: holder) -> tuple[Any, Any]:
    holder = Holder("as built")
    report = restore(Attached({"model": nn.Linear(2, 2), "holder": wrap(holder)}, mesh, rank), index, source)
    return holder.value, report


def test_on_the_same_mesh_each_rank_has_its_own_back(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, ranks(DP2_TP2, str))
    for rank in range(4):
        value, report = restored(DP2_TP2, rank, index, source)
        assert (value, report.notes) == (str(DP2_TP2.coordinate(rank)), ())


def test_what_differs_along_an_axis_that_stays_is_found_by_coordinate(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, ranks(DP2_TP2, lambda coordinate: coordinate["tp"]))
    for rank in range(8):
        value, report = restored(DP4_TP2, rank, index, source)
        assert (value, report.notes) == (DP4_TP2.coordinate(rank)["tp"], ("holder by its place on tp",))


def test_what_is_equal_on_all_ranks_needs_no_rule(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, ranks(DP2_TP2, 5))
    assert restored(TP4, 3, index, source)[0] == 5


def test_without_a_rule_another_mesh_is_refused_by_the_name_of_the_object_with_the_cure(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, ranks(DP2_TP2, str))
    with pytest.raises(TopologyMismatch) as caught:
        restored(TP4, 0, index, source)
    text = str(caught.value)
    assert "the state of 'holder' differs between ranks along dp, tp; it was saved on dp2·tp2, and this is tp4" in text
    assert "run.attach(holder=elastic.per_rank(holder, on_resize='derive'))" in text


def test_derive_leaves_the_object_as_it_was_built_and_says_so(tier: NodeTier) -> None:
    def wrap(holder: Holder) -> Any:
        return per_rank(holder, on_resize="derive")

    index, source = take_snapshot(tier, ranks(DP2_TP2, str, wrap))
    value, report = restored(TP4, 0, index, source, wrap)
    assert value == "as built"
    assert report.new == ("holder",)
    assert "as built" in report.notes[0]


def test_a_function_merges_the_states_of_all_old_ranks_tensors_included(tier: NodeTier) -> None:
    def merge(states: Any, place: Any) -> dict[str, Any]:
        assert (place.saved_mesh, place.mesh) == (DP2_TP2, TP4)
        rows = torch.cat([state["value"] for state in states])
        return {"value": rows.chunk(place.mesh.world_size)[place.rank]}

    def wrap(holder: Holder) -> Any:
        return per_rank(holder, on_resize=merge)

    def rows(coordinate: dict[str, int]) -> torch.Tensor:
        return torch.full((4000,), float(DP2_TP2.rank(coordinate)))

    index, source = take_snapshot(tier, ranks(DP2_TP2, rows, wrap))
    for rank in range(4):
        assert torch.equal(restored(TP4, rank, index, source, wrap)[0], torch.full((4000,), float(rank)))
        assert torch.equal(restored(DP2_TP2, rank, index, source, wrap)[0], torch.full((4000,), float(rank)))


def test_large_tensors_that_differ_between_ranks_are_never_saved_as_one(tier: NodeTier) -> None:
    differing = ranks(DP2_TP2, lambda coordinate: torch.full((300, 300), float(coordinate["tp"])))
    with pytest.raises(CommitRefused, match=r"holder\.value of 'holder' differs between ranks 0 and 1.*per_rank"):
        take_snapshot(tier, differing)


def test_large_tensors_that_are_alike_are_written_once(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, ranks(DP2_TP2, torch.ones(300, 300)))
    assert torch.equal(restored(TP4, 1, index, source)[0], torch.ones(300, 300))
    assert sum(index.table.nbytes.tolist()) < 2 * 300 * 300 * 4


def test_what_survivors_hold_of_differing_state_does_not_do_and_an_older_snapshot_may(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, ranks(DP2_TP2, str))
    attached = Attached({"model": nn.Linear(2, 2), "holder": Holder(0)}, DP2_TP2, 0)
    with pytest.raises(RestoreError, match="what the survivors hold is not all") as caught:
        restore(attached, index, source, live=True)
    assert type(caught.value) is RestoreError


def test_a_module_or_a_tensor_that_is_too_large_cannot_be_of_each_rank() -> None:
    with pytest.raises(CaptureError, match="knows its own layout"):
        Attached({"model": per_rank(nn.Linear(2, 2))}, TP4, 0)
    with pytest.raises(CaptureError, match=r"cannot be state of each rank.*\(holder\.value\)"):
        Attached({"holder": per_rank(Holder(torch.empty(5 << 20)))}, TP4, 0)
