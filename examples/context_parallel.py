"""Context parallelism: the ranks of axis cp share each sequence; parameters are the same on all of them.

elastic run examples/context_parallel.py:train --workers 2:4 --mesh dp=-1,cp=2 --storage /tmp/runs --name context
"""

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.parallel import DistributedDataParallel

import elastic

LENGTH, WIDTH, HEADS, VOCABULARY = 32, 32, 4, 64


class Attention(torch.nn.Module):
    """Causal attention over a sequence that lies in pieces on the ranks of ``group``: keys and values are gathered,
    queries stay where they are."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.project, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        keys, values = (all_gather_tensor_autograd(part.contiguous(), 2, self.group) for part in (k, v))
        here, first = x.shape[1], dist.get_rank(self.group) * x.shape[1]
        seen = torch.ones(here, keys.shape[2], dtype=torch.bool).tril(first)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.layers = torch.nn.ModuleList(Attention(group) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(config: dict) -> None:
    run = elastic.current_run()
    order = torch.Generator().manual_seed(0)
    first = torch.randint(VOCABULARY, (1024, 1), generator=order)
    text = (first + 3 * torch.arange(LENGTH + 1)) % VOCABULARY  # each token is the one before it plus 3
    dataset = torch.utils.data.TensorDataset(text[:, :-1], text[:, 1:])
    mesh = run.device_mesh()
    # Each rank has the mean loss of its piece of the sequence: averaged over cp as over dp, it is the mean over all.
    model = DistributedDataParallel(Model(mesh.get_group("cp")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = elastic.ElasticLoader(dataset, global_batch_size=16, seed=17)
    run.attach(model=model, optimizer=optimizer, loader=loader)
    piece = LENGTH // run.mesh.size("cp")
    places = torch.arange(piece) + piece * run.coordinate.get("cp", 0)
    for batch in run.steps(loader, until_step=config.get("steps", 60)):
        inputs, targets = (part[:, places] for part in batch)
        loss = torch.nn.functional.cross_entropy(model(inputs, places).flatten(0, 1), targets.flatten()) * batch.weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
