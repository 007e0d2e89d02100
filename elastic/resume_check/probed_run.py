"""A run that watches itself take a few steps: what a recovery check compares is noted at the places where it is true.

State at the boundaries, generators and sample ids where a batch is handed out, outputs after the first forward of a
step, gradients where the optimizer begins its step.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastic.data.loader import Batch, ElasticLoader
from elastic.gate import BoundaryGate, Order
from elastic.protocol.shares import SlotRef
from elastic.run import Run, Stopped
from elastic.run_context import RunContext, RunLink
from elastic.snapshot.module_state import ModuleState
from elastic.snapshot.optimizer_state import OptimizerState
from elastic.snapshot.restore import RestoreReport
from elastic.snapshot.staging import Stager
from elastic.snapshot.tensor_layout import is_dtensor, local_part

MOST_OUTPUT_BYTES = 64 << 20


class ProbeGate(BoundaryGate):
    """Calls ``at_boundary(step)`` at each boundary; the last one ends the run."""

    def __init__(self) -> None:
        super().__init__()
        self.at_boundary: Any = None

    def arrive(self, step: int) -> Order | None:
        self.at_boundary(step)
        return None

    def will_hold(self, step: int) -> None:
        raise Stopped


class ProbedRun(Run):
    """``directory`` takes the state at the first two boundaries and the outputs; ``notes`` is the rest, JSON-able."""

    def __init__(self, context: RunContext, link: RunLink, gate: ProbeGate, steps: int, directory: Path) -> None:
        super().__init__(context, link, gate)
        gate.at_boundary = self._at_boundary
        self._steps_wanted, self._directory = steps, directory
        self._first_step: int | None = None
        self._gradients: dict[str, dict[str, float]] = {}
        self._outputs: dict[str, Any] = {}
        self._reported: dict[str, float] = {}
        self.notes: dict[str, Any] = {"boundaries": [], "turns": []}

    def attach(self, **named: Any) -> RestoreReport | None:
        report = super().attach(**named)
        self.notes["restored"] = report.summary() if report else None
        assert self._attached is not None
        for component in self._attached.components:
            if isinstance(component, ModuleState):
                component.module.register_forward_hook(self._forward_hook(component.name))
            elif isinstance(component, OptimizerState):
                component.optimizer.register_step_pre_hook(self._gradient_hook(component))
        return report

    def steps(self, loader: ElasticLoader | None = None, *, until_step: int | None = None) -> Iterator[Any]:
        """The turns of the check, whatever the function would have asked for."""
        for batch in super().steps(loader, until_step=self.step + self._steps_wanted):
            self.notes["turns"].append({"ids": _ids(batch), "weight": _weight(batch), "generators": generators()})
            yield batch

    def report(self, **metrics: Any) -> None:
        super().report(**metrics)
        for name, value in metrics.items():
            if not isinstance(value, torch.Tensor) or value.numel() == 1:
                self._reported[name] = float(value)

    def _at_boundary(self, step: int) -> None:
        assert self._attached is not None
        if self._first_step is None:
            self._first_step = step
        else:
            self.notes["turns"][-1].update(reported=self._reported, gradients=self._gradients)
        self._reported, self._gradients = {}, {}
        number, loader = step - self._first_step, self._loader
        self.notes["boundaries"].append(
            {
                "step": step,
                "optimizer_steps": dict(self._attached.optimizer_steps()),
                "scheduler_steps": dict(self._attached.scheduler_steps()),
                "cursor": loader.cursor if loader is not None else 0,
                "samples_seen": loader.samples_seen if loader is not None else 0,
                "tokens_seen": loader.tokens_seen if loader is not None else 0,
            }
        )
        if number < 2:
            self._write_state(self._directory / f"state{number}-{self.rank}")
        if number == 1:
            np.savez(self._directory / f"outputs-{self.rank}.npz", **self._outputs)
        if number == self._steps_wanted:
            raise Stopped

    def _write_state(self, path: Path) -> None:
        """This rank's share of the state, as it would be staged: each byte lies in one rank's file."""
        assert self._attached is not None
        captured, share = self._attached.capture(), self._attached.share()
        data = path.with_suffix(".bin")
        with data.open("wb") as file:
            file.truncate(max(share.nbytes, 1))
        stager = Stager()
        stager.stage(captured, share, SlotRef(str(data), max(share.nbytes, 1), 0))
        stager.wait()
        stager.close()
        tensors = [(p.tensor.name, p.tensor.dtype, p.tensor.shape, p.tensor.itemsize) for p in share.pieces]
        places = [(p.box.offset, p.box.shape, p.offset) for p in share.pieces]
        pieces = [(*tensor, *place) for tensor, place in zip(tensors, places)]
        path.with_suffix(".json").write_text(json.dumps({"pieces": pieces, "objects": captured.objects.decode()}))

    def _forward_hook(self, name: str) -> Any:
        def note(module: Any, arguments: Any, output: Any) -> None:
            if self._first_step is None or len(self.notes["boundaries"]) != 1:
                return
            tensor = _first_tensor(output)
            if name in self._outputs:  # microbatches: of another mesh they are other parts of the batch
                self._outputs[name] = np.empty(0)
            elif tensor is not None and tensor.nbytes <= MOST_OUTPUT_BYTES:
                self._outputs[name] = local_part(tensor.detach()).to("cpu", torch.float64).numpy()

        return note

    def _gradient_hook(self, component: OptimizerState) -> Any:
        names = component.parameter_names()

        def note(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        name = names.get(id(parameter), "?")
                        self._gradients[f"{component.name}.{name}"] = _statistics(parameter.grad)

        return note


def _statistics(gradient: torch.Tensor) -> dict[str, float]:
    whole: torch.Tensor = gradient.full_tensor() if is_dtensor(gradient) else gradient  # type: ignore[operator]
    values = whole.detach().double()
    return {
        "square": float((values * values).sum()),
        "mean": float(values.mean()) if values.numel() else 0.0,
        "largest": float(values.abs().max()) if values.numel() else 0.0,
    }


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    return next((part for part in parts if isinstance(part, torch.Tensor)), None)


def _ids(batch: Any) -> list[int]:
    return [int(i) for i in batch.ids] if isinstance(batch, Batch) else []


def _weight(batch: Any) -> float:
    return float(batch.weight) if isinstance(batch, Batch) else 1.0


def generators() -> str:
    """A digest of the state of every generator of this process that a training step may draw from."""
    digest = hashlib.sha256(repr(random.getstate()).encode())
    digest.update(torch.default_generator.get_state().numpy().tobytes())
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        digest.update(repr(numpy_random.get_state()).encode())
    return digest.hexdigest()[:24]
