"""Snapshots of a model on a GPU: right while training goes on, and as fast as the way to the host allows.

    python tests/device/gpu_snapshot.py [--json] [--mib 2048] [--repeats 7]

``differences``: tensors of a snapshot taken at step s, with the next steps launched before its copies have arrived,
that are not those of a blocking copy at step s; must be 0. ``over_copy``: seconds until staging has arrived in the
pinned arena over one copy of the same bytes from device memory into pinned host memory; must be at most 1.3.
``overlap``: the part of that time in which the host was free. Exits with 1 if one of the first two is missed, and with
77 and a sentence where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from elastic.mesh import Mesh
from elastic.snapshot.arena import ArenaPool
from elastic.snapshot.capture import Attached
from elastic.snapshot.staging import Stager
from elastic.snapshot.tensor_layout import flat_bytes

NOT_RUN = 77
"""What a test that could not be run exits with, by convention."""
MOST_OVER_COPY = 1.3
WIDTH = 2048


class Training:
    """A model with AdamW, batch norm and dropout on ``device``, attached to an arena of two slots."""

    def __init__(self, device: torch.device, mib: int, directory: Path) -> None:
        torch.manual_seed(0)
        self.device = device
        width = WIDTH if mib >= 64 else 64
        layers = max(1, (mib << 20) // (3 * 4 * width * width))
        parts = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU()) for _ in range(layers)]
        self.model = nn.Sequential(*parts, nn.Dropout(0.1)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(16, width, device=device)
        self.step()
        self.attached = Attached({"model": self.model, "optimizer": self.optimizer}, Mesh((("dp", 1),)), 0)
        self.stager, self.pool = Stager(), ArenaPool(directory)
        nbytes = self.attached.share_bytes()
        self.pool.reserve(2, nbytes)
        self.slots = [self.pool.take(nbytes) for _ in range(2)]

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def stage(self, number: int) -> int:
        """Begin the copies of the state as it is now; the bytes. They have arrived when ``stager.wait`` returns."""
        slot = self.slots[number % 2]
        assert slot is not None
        return self.stager.stage(self.attached.capture(), self.attached.share(), slot)

    def held(self) -> dict[str, np.ndarray]:
        """A blocking copy of every tensor, as bytes."""
        found = self.attached.capture().tensors
        return {t.layout.spec.name: flat_bytes(t.tensor.contiguous().cpu()).numpy().copy() for t in found}

    def staged(self, number: int) -> dict[str, np.ndarray]:
        """Every tensor as it lies in the slot."""
        slot = self.slots[number % 2]
        assert slot is not None
        data = self.pool.view(slot)
        return {p.tensor.name: data[p.offset : p.offset + p.nbytes] for p in self.attached.share().pieces}

    def close(self) -> None:
        self.stager.close()
        self.pool.close()


def differences(training: Training, snapshots: int) -> int:
    """Tensors that differ between snapshots with training going on and blocking copies of the same steps."""
    found = 0
    for number in range(snapshots):
        training.step()
        expected = training.held()
        training.stage(number)
        for _ in range(3):
            training.step()
        training.stager.wait()
        staged = training.staged(number)
        assert set(staged) == set(expected)
        found += sum(not np.array_equal(staged[name], expected[name]) for name in expected)
    return found


def timings(training: Training, repeats: int) -> dict[str, float]:
    """Medians: seconds of staging until it has arrived, of it until the host was free, and of one plain copy."""
    arrived, free, plain = [], [], []
    nbytes = training.stage(0)
    training.stager.wait()
    source = torch.ones(nbytes, dtype=torch.uint8, device=training.device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    for number in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        training.stage(number)
        returned = time.perf_counter()
        training.stager.wait()
        ended = time.perf_counter()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        if number >= 2:  # the first two pin both slots
            arrived.append(ended - started)
            free.append(ended - returned)
            plain.append(time.perf_counter() - begun)
    return {
        "bytes": float(nbytes),
        "staged_s": statistics.median(arrived),
        "copy_s": statistics.median(plain),
        "over_copy": statistics.median(arrived) / statistics.median(plain),
        "overlap": statistics.median(free) / statistics.median(arrived),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--mib", type=int, default=2048, help="size of the state")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here: the GPU snapshot check was not run.")
        return NOT_RUN
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        training = Training(torch.device("cuda"), options.mib, Path(directory) / "arena")
        try:
            result = {"differences": differences(training, options.repeats), **timings(training, options.repeats)}
        finally:
            training.close()
    result["device"] = torch.cuda.get_device_name()
    for key, value in result.items():
        print(f"{key:12} {value}")
    if options.json:
        print(json.dumps(result))
    return int(result["differences"] > 0 or result["over_copy"] > MOST_OVER_COPY)


if __name__ == "__main__":
    sys.exit(main())
