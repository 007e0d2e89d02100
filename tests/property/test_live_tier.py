"""What a survivor kept is proven to be the state of its last boundary, or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime, SlotRef
from elastic.snapshot.capture import Attached
from elastic.snapshot.live_tier import BoundaryGuard, Salvage
from elastic.snapshot.save_plan import SaveShare

MESH = Mesh((("dp", 4),))
POINT = PointInTime(generation=1, step=3)


class Job:
    """A model with batch norm, AdamW and a warm-up, as it stands at boundaries."""

    def __init__(self, **extra: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, 5)
        self.extra = extra
        self.attached = Attached(
            {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, **extra}, MESH, 0
        )
        self.guard = BoundaryGuard(self.attached)
        self.guard.mark()

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.model(torch.randn(16, 6, generator=generator)).square().mean().backward()

    def steps(self, count: int) -> None:
        for step in range(count):
            self.backward(step)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.guard.mark()

    def tensors(self) -> dict[str, bytes]:
        captured = self.attached.capture()
        return {t.layout.spec.name: t.tensor.contiguous().numpy().tobytes() for t in captured.tensors}

    def salvage(self) -> tuple[Salvage | None, str]:
        return Salvage.of(self.attached, self.guard, POINT, ())


def test_a_failure_after_backward_leaves_the_boundary_bit_for_bit_batch_norm_too() -> None:
    job = Job()
    job.steps(3)
    before, objects = job.tensors(), job.attached.capture().objects
    job.backward(99)
    assert job.tensors() != before, "forward moved the running statistics"
    kept, why = job.salvage()
    assert why == ""
    assert kept is not None
    assert job.tensors() == before
    assert kept.captured.objects == objects


def test_shares_of_the_survivors_together_are_the_whole_state(tmp_path: Path) -> None:
    job = Job()
    job.steps(2)
    expected = job.tensors()
    kept, _ = job.salvage()
    assert kept is not None
    found = {name: bytearray(len(data)) for name, data in expected.items()}
    for place in range(3):
        path = tmp_path / f"slot{place}"
        capacity = kept.nbytes // 3 + kept.slack_bytes
        path.write_bytes(bytes(capacity))
        staged = kept.stage("g000001-x", SlotRef(str(path), capacity, 0), place, 3)
        assert (staged.rank, staged.world_size, staged.point) == (place, 3, POINT)
        assert staged.plan is not None
        data = path.read_bytes()
        for piece in SaveShare.from_bytes(staged.plan).pieces:
            row = piece.tensor.nbytes // max(1, piece.tensor.shape[0]) if piece.tensor.shape else piece.tensor.nbytes
            start = (piece.box.offset[0] if piece.box.offset else 0) * row
            found[piece.tensor.name][start : start + piece.nbytes] = data[piece.offset : piece.offset + piece.nbytes]
    assert {name: bytes(data) for name, data in found.items()} == expected


def test_an_optimizer_that_had_begun_is_refused() -> None:
    job = Job()
    job.steps(2)

    def interrupted(*_: Any) -> None:
        raise ConnectionError("a peer went away inside the step")

    job.optimizer.register_step_pre_hook(interrupted)
    job.backward(5)
    with pytest.raises(ConnectionError):
        job.optimizer.step()
    assert job.salvage() == (None, "AdamW had begun its step")


def test_a_finished_optimizer_step_without_a_boundary_is_refused() -> None:
    job = Job()
    job.steps(1)
    job.backward(5)
    job.optimizer.step()
    job.guard._stepping = ""  # even if the hook had not told
    kept, why = job.salvage()
    assert kept is None
    assert "were written to since the boundary" in why


def test_a_parameter_written_by_hand_is_refused() -> None:
    job = Job()
    job.steps(1)
    with torch.no_grad():
        job.model[0].weight.mul_(0.5)
    assert job.salvage()[1].startswith("1 parameters or optimizer tensors were written to")


def test_a_parameter_whose_memory_was_swapped_is_refused_though_no_write_was_counted() -> None:
    job = Job()
    job.steps(1)
    job.model[0].weight.data = torch.zeros(8, 6)
    assert job.salvage() == (None, "a parameter or optimizer tensor was given other memory")


def test_a_scheduler_that_moved_is_refused() -> None:
    job = Job()
    job.steps(1)
    job.backward(5)
    job.optimizer._opt_called = True  # torch warns about the order otherwise
    job.scheduler.step()
    assert "moved since the boundary" in job.salvage()[1]


def test_an_average_of_the_weights_that_is_kept_after_the_step_is_part_of_it() -> None:
    average = nn.Linear(3, 3)
    job = Job(average=average)
    job.steps(1)
    with torch.no_grad():
        average.weight.add_(1.0)
    job.guard.mark()
    expected = job.tensors()
    job.backward(4)
    kept, why = job.salvage()
    assert (kept is not None, why) == (True, "")
    assert job.tensors() == expected


def test_an_object_of_the_users_that_moves_inside_a_step_is_refused() -> None:
    class Counter:
        def __init__(self) -> None:
            self.seen = 0

        def state_dict(self) -> dict[str, int]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    counter = Counter()
    job = Job(counter=counter)
    job.steps(1)
    assert job.salvage()[1] == ""
    counter.seen += 1
    assert "moved since the boundary" in job.salvage()[1]


def test_accumulated_gradients_do_not_disturb_the_boundary() -> None:
    job = Job()
    job.steps(2)
    before = job.tensors()
    for micro in range(3):
        job.backward(micro)
    kept, why = job.salvage()
    assert (kept is not None, why) == (True, "")
    assert job.tensors() == before


def test_before_the_first_boundary_there_is_nothing_to_keep() -> None:
    model = nn.Linear(2, 2)
    attached = Attached({"model": model}, MESH, 0)
    assert Salvage.of(attached, BoundaryGuard(attached), POINT, ()) == (None, "no boundary was reached")
