"""Train functions of the cluster tests. Small models, every kind of state, and faults at exact places."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elastic

FEATURES = 24


class Regression(torch.utils.data.Dataset):
    """Sample i is a function of i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(FEATURES, generator=generator)
        return x, torch.tanh(x[: FEATURES // 2].sum()) + 0.1 * x[-1]


def net(dropout: float, width: int = 48) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width),
        torch.nn.GELU(),
        torch.nn.Dropout(dropout),
        torch.nn.LayerNorm(width),
        torch.nn.Linear(width, width),
        torch.nn.GELU(),
        torch.nn.Linear(width, 1),
    )


def train(config: dict[str, Any]) -> None:
    """AdamW, warm-up, dropout, DDP. ``faults`` act in the middle of a step, after backward, on one rank;
    ``early_faults`` before it, so that no peer can finish the step; ``entry_faults`` and ``entry_bomb`` before the rank
    has any state, at step 0 of a generation."""
    run = elastic.current_run()
    act(config.get("entry_faults", ()), run)
    defuse(config.get("entry_bomb"))
    torch.manual_seed(config.get("model_seed", 1))
    model = DistributedDataParallel(net(config.get("dropout", 0.1), config.get("width", 48)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    loader = elastic.ElasticLoader(
        Regression(config.get("samples", 4096)),
        global_batch_size=config.get("batch", 32),
        seed=17,
        epochs=config.get("epochs"),
        num_workers=config.get("loader_workers", 0),
    )
    run.attach(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for batch in run.steps(loader, until_step=config.get("steps")):
        x, y = batch
        loss = torch.nn.functional.mse_loss(model(x).squeeze(1), y) * batch.weight
        act(config.get("early_faults", ()), run)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        run.report(loss=total / run.world_size)
        act(config.get("faults", ()), run)
        toil(config.get("toil"), run)
        defuse(config.get("bomb"))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if "trace" in config and run.rank == 0:
            with open(config["trace"], "a") as file:
                file.write(f"{time.time()}\n")
        time.sleep(config.get("step_s", 0.0))


def toil(toil: Any, run: elastic.Run) -> None:
    """(rank, generation, first step, seconds): work that only this rank has to do, in each step from there on."""
    if toil and (run.rank, run.generation) == tuple(toil[:2]) and run.step >= toil[2]:
        end = time.perf_counter() + toil[3]
        while time.perf_counter() < end:
            pass


def defuse(bomb: str | None) -> None:
    """Do what the file ``bomb`` says, if there is one, on the rank that takes it away first."""
    if bomb is None or not os.path.exists(bomb):
        return
    taken = f"{bomb}-{os.getpid()}"
    try:
        os.rename(bomb, taken)
    except FileNotFoundError:
        return
    with open(taken) as file:
        text = file.read()
    os.remove(taken)
    if text == "exit":
        os._exit(3)
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(text)


def act(faults: Any, run: elastic.Run) -> None:
    """(kind, step, rank, generation or None): the fault that is due here, if any."""
    for kind, step, rank, generation in faults:
        if run.step == step and run.rank == rank and generation in (None, run.generation):
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "raise":
                raise ValueError(f"a bug at step {step}")
            elif kind == "exit":
                os._exit(3)
            elif kind == "crash":
                signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)
            elif kind == "memory":
                raise MemoryError("cannot allocate 8 GiB")
            elif kind == "hog":
                outgrow()
            elif kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif kind == "lock":
                locks_up()


def outgrow() -> None:
    """Allocate more than a control group of its own allows, until the kernel kills this process."""
    old = "/sys/fs/cgroup/memory"
    parent, limit = (old, "memory.limit_in_bytes") if os.path.isdir(old) else ("/sys/fs/cgroup", "memory.max")
    group = os.path.join(parent, f"elastic-test-{os.getpid()}")
    os.mkdir(group)
    for name, value in ((limit, 64 << 20), ("cgroup.procs", os.getpid())):
        with open(os.path.join(group, name), "w") as file:
            file.write(str(value))
    held = [bytearray(b"x" * (8 << 20)) for _ in range(64)]
    raise AssertionError(f"{len(held)} blocks fit")


def locks_up() -> None:
    """What a deadlock in user code looks like."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def keeps(config: dict[str, Any]) -> None:
    """Builds one thing that outlives generations, and reports which process built it and how often."""
    run = elastic.current_run()
    built = run.keep("built", lambda: [os.getpid(), 0])
    built[1] += 1
    model = DistributedDataParallel(net(0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = elastic.ElasticLoader(Regression(4096), global_batch_size=32, seed=17)
    run.attach(model=model, optimizer=optimizer, loader=loader)
    for x, y in run.steps(loader, until_step=config["steps"]):
        torch.nn.functional.mse_loss(model(x).squeeze(1), y).backward()
        run.report(builder=built[0], process=os.getpid(), entries=built[1])
        act(config.get("faults", ()), run)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(config.get("step_s", 0.0))


def swallows(config: dict[str, Any]) -> None:
    """A loop that catches whatever its step raises and goes on at once."""
    run = elastic.current_run()
    torch.manual_seed(3)
    model = DistributedDataParallel(net(0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = elastic.ElasticLoader(Regression(4096), global_batch_size=32, seed=17)
    run.attach(model=model, optimizer=optimizer, loader=loader)
    for x, y in run.steps(loader, until_step=config["steps"]):
        with contextlib.suppress(Exception):
            torch.nn.functional.mse_loss(model(x).squeeze(1), y).backward()
            act(config.get("faults", ()), run)
            optimizer.step()
            optimizer.zero_grad()


def evaluates(config: dict[str, Any]) -> None:
    """Its first step is slow, and rank 0 evaluates while the others wait: (step, seconds, limit)."""
    run = elastic.current_run()
    model = DistributedDataParallel(net(0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = elastic.ElasticLoader(Regression(4096), global_batch_size=32, seed=17)
    run.attach(model=model, optimizer=optimizer, loader=loader)
    for x, y in run.steps(loader, until_step=config["steps"]):
        if run.step == 0:
            time.sleep(config["first_s"])
        torch.nn.functional.mse_loss(model(x).squeeze(1), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for step, seconds, limit_s in config["evaluations"]:
            if run.step == step and run.rank == 0:
                with run.phase("evaluation", limit_s=limit_s):
                    time.sleep(seconds)


def raises_at_once(config: dict[str, Any]) -> None:
    raise ZeroDivisionError("before anything")


def never_attaches(config: dict[str, Any]) -> None:
    elastic.current_run()


def attaches_a_socket(config: dict[str, Any]) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"thing": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    run = elastic.current_run()
    run.attach(odd=Odd(), model=torch.nn.Linear(2, 2))
    for _ in run.steps(until_step=3):
        pass


def other_model(config: dict[str, Any]) -> None:
    run = elastic.current_run()
    model = torch.nn.Linear(5, 7)
    run.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.steps(until_step=config["steps"]):
        pass
