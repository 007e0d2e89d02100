"""The train function of the demo: ordinary PyTorch, with ``attach``, ``steps`` and ``report`` around it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import elastic
from elastic.demo.gpt import ByteGPT


def train(config: Mapping[str, Any]) -> None:
    """Train until ``config["steps"]`` steps are done over the run's whole life. ``pace_s`` is the least that a step
    takes: on a machine where the small model is too fast, nothing could be seen of what happens in between."""
    run = elastic.current_run()
    dataset = elastic.TokenDataset(config["tokens"], config["context"])
    model = DistributedDataParallel(ByteGPT(context=config["context"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, config["warm_up_steps"])
    loader = elastic.ElasticLoader(dataset, global_batch_size=config["global_batch_size"], seed=17)
    run.attach(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for batch in run.steps(loader, until_step=config["steps"]):
        began = time.monotonic()
        x, y = batch
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) * batch.weight
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.report(loss=loss / batch.weight if batch.weight else loss)
        time.sleep(max(0.0, config["pace_s"] - (time.monotonic() - began)))
