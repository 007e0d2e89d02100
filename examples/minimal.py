"""The smallest elastic run: a regression with DDP. Start it either way; kill what you like meanwhile.

elastic run examples/minimal.py:train --workers 1:2 --storage /tmp/runs --name minimal
python examples/minimal.py
"""

import torch
from torch.nn.parallel import DistributedDataParallel

import elastic


def train(config: dict) -> None:
    run = elastic.current_run()
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("lr", 0.01))
    loader = elastic.ElasticLoader(dataset, global_batch_size=64, seed=17)
    run.attach(model=model, optimizer=optimizer, loader=loader)  # names the state; restores it if there is some
    for batch in run.steps(loader, until_step=config.get("steps", 200)):  # between two turns lies the boundary
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(model(inputs), targets) * batch.weight  # uneven shares add up
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)


if __name__ == "__main__":
    result = elastic.ElasticTrainer(
        train,
        train_loop_config={"lr": 0.01},
        scaling_config=elastic.ScalingConfig(num_workers=(1, 2)),
        run_config=elastic.RunConfig(name="minimal", storage_path="/tmp/runs"),
    ).fit()
    print(result.status, result.step, *result.metrics[-1:])  # no metrics if it had finished before
