"""The toy job of the recovery and goodput benchmarks, once for us and once for Ray Train.

Model, data, optimizer, the time of a step and what is written down are shared; only what each system asks of its user
differs. Every rank appends what it does to one file, with the machine's monotonic clock, so that both are measured by
the train function itself and by nothing else.

    entered   the train function was called (its ``at`` on rank 0 names the attempt)
    took      the rank has the batch of a step, with the ids of its samples
    did       the optimizer has taken the step that the rank had the batch for at ``began``
    raised    the bug of the job struck
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

STEP_S = 0.1
"""Stands for the compute of a real model: ranks share two cores here."""
GLOBAL_BATCH = 32
SAMPLES = 1 << 17
FEATURES = 16
SEED = 17
CHECKPOINT_EVERY = 50
"""Steps between two checkpoints of Ray Train."""
STATE_FILE = "state.pt"


class Numbered(Dataset):  # type: ignore[type-arg]
    """Samples that say which they are."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.x[index].sum()


def ours(config: dict[str, Any]) -> None:
    """For ``elastic.ElasticTrainer``."""
    import elastic

    run = elastic.current_run()
    told = StepWriter(config["log"], run.rank, run.world_size)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters())
    loader = elastic.ElasticLoader(Numbered(), global_batch_size=GLOBAL_BATCH, seed=SEED)
    run.attach(model=model, optimizer=optimizer, loader=loader)
    for batch in run.steps(loader, until_step=config["steps"]):
        ids, x, y = batch
        take(told, config, run.step + 1, ids, model, optimizer, x, y, batch.weight)


def ray_trains(config: dict[str, Any]) -> None:
    """For ``ray.train.torch.TorchTrainer``, after its user guide: a sampler with a share for each worker, a checkpoint
    from rank 0 that also tells how many batches were taken, and as many left out after a restart."""
    from ray import train
    from ray.train.torch import prepare_model

    context = train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    told = StepWriter(config["log"], rank, world_size)
    model = prepare_model(net())
    optimizer = torch.optim.AdamW(model.parameters())
    done = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, STATE_FILE))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    share = GLOBAL_BATCH // world_size
    dataset = Numbered()
    order = list(DistributedSampler(dataset, world_size, rank, seed=SEED))
    loader = DataLoader(dataset, batch_size=share, sampler=order[done * share :])
    for step, (ids, x, y) in enumerate(loader, done + 1):
        take(told, config, step, ids, model, optimizer, x, y, 1.0)
        if step % CHECKPOINT_EVERY == 0:
            with tempfile.TemporaryDirectory() as directory:
                reported = None
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, os.path.join(directory, STATE_FILE))
                    reported = train.Checkpoint.from_directory(directory)
                train.report({"step": step}, checkpoint=reported)
        if step >= config["steps"]:
            return


def sampled_order() -> list[int]:
    """All samples as Ray Train's sampler orders them, whatever the world size."""
    return list(DistributedSampler(Numbered(), 1, 0, seed=SEED))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def take(
    told: StepWriter,
    config: dict[str, Any],
    step: int,
    ids: torch.Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    weight: float,
) -> None:
    """One step, the same for both."""
    began = told.write("took", step, ids=ids.tolist())
    time.sleep(STEP_S)
    if step == config.get("bug_at") and told.rank == told.world_size - 1:
        told.write("raised", step)
        raise ValueError(f"the bug at step {step}")
    loss = nn.functional.mse_loss(model(x).squeeze(1), y) * weight
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    told.write("did", step, began=began)


class StepWriter:
    """Appends whole lines to a file that all ranks share. Needs a process group: rank 0 names the attempt."""

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        entered = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.broadcast(entered, 0)
        self._about = {
            "attempt": entered.item(),
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
        }
        self.write("entered", 0)

    def write(self, kind: str, step: int, **more: Any) -> float:
        """The time that was written."""
        at = time.monotonic()
        line = json.dumps({"kind": kind, "at": at, "step": step, **more, **self._about})
        os.write(self._file, f"{line}\n".encode())
        return at

    def __del__(self) -> None:
        os.close(self._file)
