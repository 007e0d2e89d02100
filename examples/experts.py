"""Mixture of experts: axis ep shares out the experts, and each rank brings its own samples.

An expert is saved under its number in the whole model, with its moments, so that it can lie on any rank the next time.

elastic run examples/experts.py:train --workers 2:4 --mesh ep=-1 --storage /tmp/runs --name experts
"""

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

import elastic

EXPERTS, WIDTH = 12, 24


class Mixture(torch.nn.Module):
    """Each sample goes to the one expert that the router prefers, wherever that lies."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, ranks, here = group, dist.get_world_size(group), dist.get_rank(group)
        self.ranks, self.each = ranks, EXPERTS // ranks
        self.router = torch.nn.Linear(WIDTH, EXPERTS)
        mine = range(here * self.each, (here + 1) * self.each)
        self.experts = torch.nn.ModuleDict({str(number): torch.nn.Linear(WIDTH, WIDTH) for number in mine})
        elastic.declare(self.experts, held_at={"ep": here})  # they lie on this rank, under their global numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=EXPERTS)
        counts = all_to_all_single_autograd(sent, None, None, self.group).view(self.ranks, self.each)
        to, back = sent.view(self.ranks, self.each).sum(1).tolist(), counts.sum(1).tolist()
        here = all_to_all_single_autograd(x[order], back, to, self.group)
        # What came lies by sender, and of each sender by expert.
        of = torch.arange(self.each).repeat(self.ranks).repeat_interleave(counts.flatten())
        done = torch.zeros_like(here)
        for number, expert in enumerate(self.experts.values()):
            rows = (of == number).nonzero().flatten()
            done = done.index_add(0, rows, torch.nn.functional.gelu(expert(here[rows])))
        mixed = torch.empty_like(x).index_copy(0, order, all_to_all_single_autograd(done, to, back, self.group))
        return x + weight[:, None] * mixed


def train(config: dict) -> None:
    run = elastic.current_run()
    x = torch.randn(2048, WIDTH, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(x, x.flip(1))
    group = run.device_mesh().get_group("ep")
    model = torch.nn.Sequential(Mixture(group), Mixture(group), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = elastic.ElasticLoader(dataset, global_batch_size=32, seed=17)
    run.attach(model=model, optimizer=optimizer, loader=loader)
    for batch in run.steps(loader, until_step=config.get("steps", 60)):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(model(inputs), targets) * batch.weight
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if ".experts." not in name:  # an expert has met the samples of all ranks already
                dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= run.world_size
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
