"""FSDP2: every rank holds a piece of each parameter, and of its moments; a resize cuts the pieces anew.

elastic run examples/fsdp2.py:train --workers 2:4 --storage /tmp/runs --name fsdp2
"""

import torch
from torch.distributed.fsdp import fully_shard

import elastic


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def train(config: dict) -> None:
    run = elastic.current_run()
    x = torch.randn(2048, 30, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(x, x.cumsum(1) / 5)
    model = torch.nn.Sequential(*(Block(30) for _ in range(3)))
    mesh = run.device_mesh()  # the axes of ScalingConfig.mesh, sized for the ranks of the day
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = elastic.ElasticLoader(dataset, global_batch_size=32, seed=17)
    run.attach(model=model, optimizer=optimizer, loader=loader)
    for batch in run.steps(loader, until_step=config.get("steps", 60)):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(model(inputs), targets) * batch.weight
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
