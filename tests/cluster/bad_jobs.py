"""Train functions with a mistake in them, and two that differ in their model."""

from __future__ import annotations

import threading
from typing import Any

import torch

import elastic


class Lock:
    """State that cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never saved, so never restored")


def _train(outputs: int = 1, **more: Any) -> None:
    run = elastic.current_run()
    model = torch.nn.Linear(4, outputs)
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model=model, optimizer=optimizer, **more)
    for _ in run.steps(until_step=3):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trains() -> None:
    _train()


def trains_another_model() -> None:
    _train(outputs=2)


def raises() -> None:
    raise ValueError("no such optimizer: adamm")


def never_attaches() -> None:
    torch.zeros(1)


def attaches_a_lock() -> None:
    _train(lock=Lock())


def attaches_what_has_no_state() -> None:
    _train(thing=object())


def holds_a_layer_of_its_own() -> None:
    """A pipeline stage that nobody was told of."""
    run = elastic.current_run()
    model = torch.nn.ModuleDict({f"layer {run.rank}": torch.nn.Linear(4, 4)})
    run.attach(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    for _ in run.steps(until_step=3):
        pass
