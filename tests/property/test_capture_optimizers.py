"""Optimizers, schedulers, scalers and generators come back exactly, whatever their kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.simulated_ranks import mesh_of, take_snapshot
from torch import nn
from torch.optim import lr_scheduler as schedulers

from elastic.errors import ModelMismatch, VersionMismatch
from elastic.snapshot.capture import Attached
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.restore import restore
from elastic.snapshot.rng import load_generators, saved_generators, seed_everything
from elastic.snapshot.tree import decode, encode


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NodeTier]:
    tier = NodeTier(tmp_path / "arena")
    yield tier
    tier.close()


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
    data = torch.randn(8, 60, generator=torch.Generator().manual_seed(3))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    for _ in range(times):
        optimizer.step(closure)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_nothing_had_happened(tier: NodeTier, kind: str) -> None:
    model = model_of(0)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    step(model, optimizer, 3)
    ranks = [Attached({"model": model, "optimizer": optimizer}, mesh_of(3), rank) for rank in range(3)]
    index, source = take_snapshot(tier, ranks)
    fresh = model_of(1)
    again = OPTIMIZERS[kind](list(fresh.parameters()))
    restore(Attached({"model": fresh, "optimizer": again}, mesh_of(2), 1), index, source)
    step(model, optimizer, 3)
    step(fresh, again, 3)
    for a, b in zip(model.parameters(), fresh.parameters()):
        assert torch.equal(a, b)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, [lambda s: 0.9**s]),
    "step": lambda o: schedulers.StepLR(o, 2),
    "multi": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.8),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 9),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "onecycle": lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=30),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.2, step_size_up=3),
    "warmup": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ConstantLR(o, 0.5)], [3]
    ),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.ExponentialLR(o, 0.9), schedulers.StepLR(o, 2)], o),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 9),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(tier: NodeTier, kind: str) -> None:
    def build() -> tuple[torch.optim.Optimizer, object]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.3, momentum=0.9)
        return optimizer, SCHEDULERS[kind](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: object, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    first, second = build(), build()
    rates(*first, 4)
    index, source = take_snapshot(
        tier, [Attached({"o": first[0], "scheduler": first[1]}, mesh_of(2), r) for r in (0, 1)]
    )
    attached = Attached({"o": second[0], "scheduler": second[1]}, mesh_of(2), 1)
    restore(attached, index, source)
    if kind != "chained":
        assert attached.scheduler_steps() == (("scheduler", first[1].last_epoch),)
    assert rates(*second, 8) == rates(*first, 8)


def test_a_plateau_scheduler_and_a_scaler_come_back(tier: NodeTier) -> None:
    def build() -> dict[str, object]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.3)
        plateau = schedulers.ReduceLROnPlateau(optimizer, patience=1)
        return {"optimizer": optimizer, "scheduler": plateau, "scaler": torch.amp.GradScaler("cpu", init_scale=512.0)}

    first, second = build(), build()
    for loss in (3.0, 2.0, 2.5):
        first["scheduler"].step(loss)
    first["scaler"].scale(torch.ones(1))
    first["scaler"].update(64.0)
    index, source = take_snapshot(tier, [Attached(first, mesh_of(1), 0)])
    restore(Attached(second, mesh_of(1), 0), index, source)
    assert second["scheduler"].state_dict() == first["scheduler"].state_dict()
    assert second["scaler"].state_dict() == first["scaler"].state_dict()


def test_state_follows_its_parameter_when_groups_are_in_another_order(tier: NodeTier) -> None:
    def build(seed: int, reverse: bool) -> dict[str, object]:
        model = model_of(seed)
        groups = [{"params": [p], "lr": 0.1 * (n + 1)} for n, p in enumerate(model.parameters())]
        return {"model": model, "optimizer": torch.optim.Adam(groups[::-1] if reverse else groups)}

    first, second = build(0, False), build(1, True)
    step(first["model"], first["optimizer"], 2)
    index, source = take_snapshot(tier, [Attached(first, mesh_of(1), 0)])
    with pytest.raises(ModelMismatch, match="other parameter groups"):
        restore(Attached(second, mesh_of(1), 0), index, source)
    restore(Attached(second, mesh_of(1), 0), index, source, "training")
    for a, b in zip(first["model"].parameters(), second["model"].parameters()):
        assert torch.equal(first["optimizer"].state[a]["exp_avg"], second["optimizer"].state[b]["exp_avg"])
    assert [g["lr"] for g in second["optimizer"].param_groups] == [g["lr"] for g in first["optimizer"].param_groups][
        ::-1
    ]


def test_an_optimizer_of_another_kind_is_refused_when_strict_and_starts_anew_otherwise(tier: NodeTier) -> None:
    first = {"model": model_of(0)}
    first["optimizer"] = torch.optim.Adam(first["model"].parameters())
    step(first["model"], first["optimizer"], 1)
    index, source = take_snapshot(tier, [Attached(first, mesh_of(1), 0)])
    second = {"model": model_of(1)}
    second["optimizer"] = torch.optim.SGD(second["model"].parameters(), lr=0.7)
    with pytest.raises(VersionMismatch, match=r"optimizer kind of optimizer Adam → SGD.*bring the old optimizer back"):
        restore(Attached(second, mesh_of(1), 0), index, source)
    report = restore(Attached(second, mesh_of(1), 0), index, source, "training")
    assert report.notes == ("versions differ (mode training): optimizer kind of optimizer Adam → SGD",)
    assert not second["optimizer"].state
    assert second["optimizer"].param_groups[0]["lr"] == 0.7


def test_two_models_with_equal_names_keep_their_optimizer_state_apart(tier: NodeTier) -> None:
    def build(seed: int) -> dict[str, object]:
        state: dict[str, object] = {"generator": model_of(seed), "critic": model_of(seed + 1)}
        for name in ("generator", "critic"):
            state[f"{name}_optimizer"] = torch.optim.Adam(state[name].parameters())
        return state

    first, second = build(0), build(5)
    for times, name in enumerate(("generator", "critic"), 1):
        step(first[name], first[f"{name}_optimizer"], times)
    index, source = take_snapshot(tier, [Attached(first, mesh_of(2), r) for r in range(2)])
    attached = Attached(second, mesh_of(1), 0)
    restore(attached, index, source)
    assert attached.optimizer_steps() == (("generator_optimizer", 1), ("critic_optimizer", 2))
    for name in ("generator", "critic"):
        a, b = (s[f"{name}_optimizer"].state_dict()["state"] for s in (first, second))
        assert all(torch.equal(a[n]["exp_avg"], b[n]["exp_avg"]) for n in a)


def test_steps_count_where_the_first_parameter_had_no_gradient_and_over_a_restore(tier: NodeTier) -> None:
    """An expert that nothing was sent to: its optimizer's ranks must not seem to stand at another step."""

    def build() -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
        experts = torch.nn.ModuleDict({"0": torch.nn.Linear(2, 2), "1": torch.nn.Linear(2, 2)})
        return experts, torch.optim.AdamW(experts.parameters())

    experts, optimizer = build()
    first = Attached({"model": experts, "optimizer": optimizer}, mesh_of(1), 0)
    assert first.optimizer_steps() == (("optimizer", 0),)
    for _ in range(3):
        experts["1"](torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert first.optimizer_steps() == (("optimizer", 3),)
    index, source = take_snapshot(tier, [first])
    experts, optimizer = build()
    second = Attached({"model": experts, "optimizer": optimizer}, mesh_of(1), 0)
    restore(second, index, source)
    assert second.optimizer_steps() == (("optimizer", 3),)


def test_the_next_plan_is_announced_before_the_optimizer_has_state() -> None:
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters())
    attached = Attached({"model": model, "optimizer": optimizer}, mesh_of(3), 0)
    before = attached.share_bytes()
    step(model, optimizer, 1)
    attached.capture()
    assert attached.share().nbytes <= before


def test_generators_draw_the_same_for_the_same_step_and_others_for_any_other() -> None:
    def draws(seed: int, step: int, **coordinate: int) -> tuple[float, float, float]:
        seed_everything(seed, step, coordinate)
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    assert draws(1, 2, dp=3, tp=1) == draws(1, 2, tp=1, dp=3)
    different = [draws(1, 2, dp=3), draws(2, 2, dp=3), draws(1, 3, dp=3), draws(1, 2, dp=4), draws(2, 1, dp=3)]
    different += [draws(1, 2, tp=3), draws(12, 2, dp=3), draws(-1, 2, dp=3), draws(2**80, 2, dp=3), draws(1, 2)]
    for column in zip(*different):
        assert len(set(column)) == len(different)


def test_saved_generators_draw_what_they_would_have_drawn() -> None:
    saved = decode(encode(saved_generators()))
    expected = random.random(), np.random.rand(), torch.rand(3)
    load_generators(saved)
    assert (random.random(), np.random.rand()) == expected[:2]
    assert torch.equal(torch.rand(3), expected[2])
