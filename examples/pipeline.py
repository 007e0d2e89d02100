"""A pipeline: each stage holds its own layers, under the names that they have in the whole model.

So four layers on two stages go on as four layers on one stage, or on four.

elastic run examples/pipeline.py:train --workers 2:4 --mesh dp=-1,pp=2 --storage /tmp/runs --name pipeline
"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import elastic

LAYERS, WIDTH, MICROBATCHES = 4, 24, 4


class Stage(torch.nn.Module):
    """Layers ``first`` to ``last`` of the model, named by their place in the whole of it."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(place): torch.nn.Linear(WIDTH, WIDTH) for place in range(first, last)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + torch.nn.functional.gelu(layer(x))
        return x


def train(config: dict) -> None:
    run = elastic.current_run()
    x = torch.randn(2048, WIDTH, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(x, x.cumsum(1) / 5)
    stages, here = run.mesh.size("pp"), run.coordinate.get("pp", 0)
    last = here == stages - 1
    model = Stage(LAYERS * here // stages, LAYERS * (here + 1) // stages)
    mesh = run.device_mesh()
    stage = PipelineStage(model, here, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = elastic.ElasticLoader(dataset, global_batch_size=32, seed=17)
    elastic.declare(model, held_at={"pp": here})  # the layers of this stage are nowhere else
    run.attach(model=model, optimizer=optimizer, loader=loader)
    for batch in run.steps(loader, until_step=config.get("steps", 60)):
        inputs, targets = batch
        losses: list[torch.Tensor] = []
        schedule.step(*((inputs,) if here == 0 else ()), target=targets if last else None, losses=losses)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=mesh.get_group("dp"))
            parameter.grad /= run.mesh.size("dp")
        loss = torch.stack(losses).mean() if last else torch.zeros(())
        dist.all_reduce(loss, group=mesh.get_group("pp"))  # rank 0 reports, the last stage knows
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
