"""Modes of a restore: what each takes, what it refuses by name, and what it says of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.simulated_ranks import mesh_of, take_snapshot
from torch import nn

from elastic.config import RestoreConfig
from elastic.data.loader import ElasticLoader
from elastic.errors import ModelMismatch, VersionMismatch
from elastic.snapshot.capture import Attached
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.restore import restore

VERSIONS = {"torch": "2.12.0", "python": "3.11", "code": "train.py 11", "model": "v1"}


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NodeTier]:
    tier = NodeTier(tmp_path / "arena")
    yield tier
    tier.close()


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, fingerprint: str = "") -> None:
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def state(seed: int, layers: int = 2, fingerprint: str = "", batch: int = 8) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = ElasticLoader(Numbers(fingerprint), global_batch_size=batch)
    loader.bind(0, 1)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}


def train(found: dict[str, Any], steps: int) -> dict[str, Any]:
    for _ in range(steps):
        found["loader"].fetch()
        found["model"](torch.ones(2, 3)).sum().backward()
        found["optimizer"].step()
        found["scheduler"].step()
        found["optimizer"].zero_grad()
        found["loader"].advance()
    return found


def attached(found: dict[str, Any]) -> Attached:
    return Attached(found, mesh_of(1), 0)


def test_training_takes_everything_but_the_data_and_strict_takes_the_data_too(tier: NodeTier) -> None:
    saved = train(state(0), 3)
    index, source = take_snapshot(tier, [attached(saved)], step=3)
    for mode, cursor in (("strict", 24), ("training", 0)):
        fresh = state(1)
        report = restore(attached(fresh), index, source, mode)
        assert report.mode == mode
        assert torch.equal(fresh["model"][0].weight, saved["model"][0].weight)
        assert fresh["optimizer"].state[fresh["model"][0].weight]["step"] == 3
        assert fresh["scheduler"].last_epoch == 3
        assert fresh["loader"].cursor == cursor
        assert report.new == report.dropped == (() if mode == "strict" else ("loader",))


def test_strict_refuses_other_versions_with_the_list_and_the_cure(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, [attached(state(0))], step=7)
    index = replace(index, versions=VERSIONS)
    here = VERSIONS | {"torch": "2.13.0", "model": "v2"}
    fresh = state(1)
    before = fresh["model"][0].weight.clone()
    with pytest.raises(VersionMismatch) as caught:
        restore(attached(fresh), index, source, versions=here)
    text = str(caught.value)
    assert "the snapshot of step 7 was made with other versions: model v1 → v2, torch 2.12.0 → 2.13.0" in text
    assert "RestoreConfig(accept_versions=['model', 'torch'])" in text
    assert "--accept model --accept torch" in text
    assert "restore='training'" in text
    assert torch.equal(fresh["model"][0].weight, before), "nothing live is touched"


def test_versions_that_are_accepted_or_do_not_matter_to_the_mode_are_reported(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, [attached(state(0))], step=7)
    index = replace(index, versions=VERSIONS)
    here = VERSIONS | {"torch": "2.13.0"}
    how = RestoreConfig(accept_versions=("dependencies",))
    report = restore(attached(state(1)), index, source, how, versions=here)
    assert report.notes == ("versions differ (accepted): torch 2.12.0 → 2.13.0",)
    assert report.unchecked == ("tokenizer", "container", "dependencies", "elastic", "data")
    assert "not compared: tokenizer, container" in str(report)
    told = report.summary()
    assert sum(told["bytes_from"].values()) == report.read_bytes > 0
    assert set(told["parts_s"]) == {"plan", "read", "copy", "load"}
    assert "MiB in" in str(report)
    assert all(f"{place} " in str(report) for place in told["bytes_from"])
    report = restore(attached(state(1)), index, source, "training", versions=here)
    assert report.notes == ("versions differ (mode training): torch 2.12.0 → 2.13.0",)
    assert restore(attached(state(1)), index, source).unchecked == (), "a recovery within a run compares none"


def test_other_data_under_the_same_loader_is_another_version_of_the_data(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, [attached(train(state(0, fingerprint="one"), 2))], step=2)
    index = replace(index, versions={"data": "one"})
    with pytest.raises(VersionMismatch, match="data one → two"):
        restore(attached(state(1, fingerprint="two")), index, source, versions={"data": "two"})
    fresh = state(1, fingerprint="two")
    restore(attached(fresh), index, source, RestoreConfig(accept_versions=("data",)), versions={"data": "two"})
    assert fresh["loader"].cursor == 16


def test_another_order_of_the_samples_is_refused_before_anything_is_touched(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, [attached(train(state(0), 2))], step=2)
    fresh = state(1, batch=4)
    found, before = attached(fresh), fresh["model"][0].weight.clone()
    with pytest.raises(ModelMismatch, match="does not fit what is attached: loader global_batch_size is 4, was 8"):
        restore(found, index, source)
    assert found.broken is None
    assert torch.equal(fresh["model"][0].weight, before)


@pytest.mark.parametrize(
    ("how", "refused"),
    [
        (RestoreConfig(), ["model.2.weight", "optimizer.state.2.weight"]),
        (RestoreConfig(mode="training"), ["model.2.weight", "optimizer.state.2.weight"]),
        (RestoreConfig(mode="training", missing_weights="report"), ["optimizer.state.2.weight"]),
        (RestoreConfig(mode="training", missing_optimizer="report"), ["model.2.weight"]),
        (RestoreConfig(mode="weights", missing_weights="error"), ["model.2.weight"]),
    ],
)
def test_names_that_the_snapshot_lacks_are_refused_for_weights_and_optimizer_apart(
    tier: NodeTier, how: RestoreConfig, refused: list[str]
) -> None:
    index, source = take_snapshot(tier, [attached(train(state(0), 1))])
    with pytest.raises(ModelMismatch) as caught:
        restore(attached(state(1, layers=3)), index, source, how)
    text = str(caught.value)
    assert [name in text for name in ("model.2.weight", "optimizer.state.2.weight")] == [
        name in refused for name in ("model.2.weight", "optimizer.state.2.weight")
    ]


def test_missing_names_can_be_reported_or_ignored_and_stay_as_they_were_built(tier: NodeTier) -> None:
    saved = train(state(0), 1)
    index, source = take_snapshot(tier, [attached(saved)])
    fresh = state(1, layers=3)
    before = fresh["model"][2].weight.clone()
    how = RestoreConfig(mode="training", missing_weights="report", missing_optimizer="ignore")
    report = restore(attached(fresh), index, source, how)
    assert report.new == ("loader", "model.2.weight", "model.2.bias")
    assert torch.equal(fresh["model"][2].weight, before)
    assert torch.equal(fresh["model"][1].weight, saved["model"][1].weight)
    assert fresh["model"][2].weight not in fresh["optimizer"].state
    train(fresh, 1)


def test_unexpected_names_can_be_reported_or_ignored(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, [attached(train(state(0, layers=3), 1))])
    with pytest.raises(ModelMismatch, match="not in this model"):
        restore(attached(state(1)), index, source, "training")
    how = RestoreConfig(mode="training", unexpected_weights="ignore", unexpected_optimizer="report")
    report = restore(attached(state(1)), index, source, how)
    assert set(report.dropped) == {"loader", "optimizer.state.2.weight", "optimizer.state.2.bias"}


def test_the_moments_of_an_optimizer_that_has_none_yet_are_restored(tier: NodeTier) -> None:
    """A fresh Adam has no moments; they must not begin at zero in silence."""
    saved = train(state(0), 3)
    index, source = take_snapshot(tier, [attached(saved)])
    fresh = state(1)
    assert not fresh["optimizer"].state
    restore(attached(fresh), index, source, "training")
    for ours, theirs in zip(fresh["model"].parameters(), saved["model"].parameters()):
        kept = fresh["optimizer"].state[ours]
        assert torch.equal(kept["exp_avg_sq"], saved["optimizer"].state[theirs]["exp_avg_sq"])


def test_a_learning_rate_that_the_program_sets_anew_gives_way_to_the_saved_one(tier: NodeTier) -> None:
    """A rank that joins takes the learning rate of the boundary, not the one that its own code begins with."""
    saved = train(state(0), 4)
    index, source = take_snapshot(tier, [attached(saved)])
    fresh = state(1)
    for group in fresh["optimizer"].param_groups:
        group["lr"] = 99.0
    restore(attached(fresh), index, source)
    assert fresh["optimizer"].param_groups[0]["lr"] == saved["optimizer"].param_groups[0]["lr"]
    assert fresh["scheduler"].get_last_lr() == saved["scheduler"].get_last_lr()


def test_masters_outside_the_state_dict_cannot_overwrite_what_was_restored(tier: NodeTier) -> None:
    """The restore copies in place, so that masters kept as views of the parameters see it; copies made before are the
    program's own, to be attached by name."""

    class Masters:
        def __init__(self, model: nn.Module) -> None:
            self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

        def state_dict(self) -> dict[str, torch.Tensor]:
            return self.values

        def load_state_dict(self, values: dict[str, torch.Tensor]) -> None:
            self.values = values

    saved = state(0)
    index, source = take_snapshot(tier, [attached({**saved, "masters": Masters(saved["model"])})])
    fresh = state(1)
    masters = Masters(fresh["model"])
    restore(attached({**fresh, "masters": masters}), index, source)
    assert all(torch.equal(masters.values[name], p) for name, p in fresh["model"].named_parameters())
    with pytest.raises(ModelMismatch, match="masters"):
        restore(attached(state(1)), index, source)


def test_a_wrapper_that_comes_or_goes_between_save_and_load_changes_no_name(tier: NodeTier) -> None:
    saved = state(0)

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    wrapped = {**saved, "model": Wrapper(saved["model"])}
    index, source = take_snapshot(tier, [attached(wrapped)])
    fresh = state(1)
    report = restore(attached(fresh), index, source)
    assert report.new == report.dropped == ()
    assert torch.equal(fresh["model"][0].weight, saved["model"][0].weight)
