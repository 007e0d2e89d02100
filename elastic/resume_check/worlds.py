"""The ranks of one mesh as processes on this machine: started, awaited, ended, and what they saw put together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.errors import ClusterError, RestoreError, TrainingFailed
from elastic.mesh import DATA_AXES, Mesh

_FAILS_TO_RESTORE = (
    "CorruptSnapshot",
    "ModelMismatch",
    "RestoreError",
    "TopologyMismatch",
    "VersionMismatch",
)


@dataclass(frozen=True, slots=True)
class World:
    """What the ranks of one mesh saw. ``answers`` is by rank; states and outputs lie in ``directory``."""

    mesh: Mesh
    directory: Path
    answers: tuple[dict[str, Any], ...]

    def data_ranks(self) -> list[int]:
        """One rank for each data-parallel rank, in order."""
        found: dict[int, int] = {}
        for rank in range(self.mesh.world_size):
            found.setdefault(self.mesh.place(DATA_AXES, self.mesh.coordinate(rank))[0], rank)
        return [found[place] for place in sorted(found)]

    def sample_ids(self, turn: int) -> list[int]:
        """The ids of all samples of a step, in the global order."""
        return [i for rank in self.data_ranks() for i in self.answers[rank]["turns"][turn]["ids"]]

    def metric(self, name: str, turn: int) -> float | None:
        """A reported number over all ranks that reported it: their mean. So that of a loss over the samples of a data
        rank, or over a piece of their sequences, is the loss of the whole batch."""
        values = [answer["turns"][turn].get("reported", {}).get(name) for answer in self.answers]
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    def gradients(self, turn: int) -> dict[str, dict[str, float]]:
        """Statistics of every parameter's gradient, by name."""
        found: dict[str, dict[str, float]] = {}
        for answer in self.answers:
            for name, statistics in answer["turns"][turn].get("gradients", {}).items():
                found.setdefault(name, statistics)
        return found

    def outputs(self) -> dict[str, npt.NDArray[np.float64]]:
        """The outputs of the attached modules for the global batch of the first step, where they have its rows."""
        parts: dict[str, list[npt.NDArray[np.float64]]] = defaultdict(list)
        for rank in self.data_ranks():
            with np.load(self.directory / f"outputs-{rank}.npz", allow_pickle=False) as held:
                for name in held.files:
                    parts[name].append(held[name])
        wanted = len(self.data_ranks())
        return {name: np.concatenate(p) for name, p in parts.items() if len(p) == wanted and p[0].ndim}

    def objects(self, number: int, rank: int = 0) -> str:
        """The objects of a rank at boundary ``number``, as they would be saved."""
        return str(self._share(number, rank)["objects"])

    def tensors(self, number: int) -> Iterator[tuple[str, str, npt.NDArray[np.uint8]]]:
        """(name, dtype, bytes) of every logical tensor at boundary ``number``, one after the other, sorted by name."""
        boxes: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        for rank in range(self.mesh.world_size):
            for piece in self._share(number, rank)["pieces"]:
                boxes[piece[0]].append((rank, piece))
        files = [
            np.memmap(self.directory / f"state{number}-{rank}.bin", np.uint8, mode="r")
            for rank in range(self.mesh.world_size)
        ]
        for name in sorted(boxes):
            _, (_, dtype, shape, itemsize, *_) = boxes[name][0]
            whole = np.empty((*shape, itemsize), np.uint8)
            for rank, (_, _, _, _, offset, extent, start) in boxes[name]:
                nbytes = int(np.prod(extent, dtype=np.int64)) * itemsize
                cut = tuple(slice(a, a + n) for a, n in zip(offset, extent))
                whole[cut] = files[rank][start : start + nbytes].reshape(*extent, itemsize)
            yield name, dtype, whole

    def _share(self, number: int, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / f"state{number}-{rank}.json").read_text())
        return found


def run_world(spec: dict[str, Any], mesh: Mesh, directory: Path, timeout_s: float) -> World:
    """Take the steps of ``spec`` with the ranks of ``mesh``. Raises TrainingFailed with the user's traceback,
    RestoreError where the snapshot cannot be taken up, ClusterError if it takes too long."""
    directory.mkdir()
    place = directory / "spec.json"
    place.write_text(json.dumps({**spec, "mesh": mesh.axes}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    environment.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # a process that forks has no other threads
    with (directory / "stderr").open("wb") as errors:
        words = [sys.executable, "-m", "elastic.resume_check.rank", str(place)]
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=errors, env=environment, start_new_session=True
        )
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"the ranks of {mesh} did not take their steps within {timeout_s:g} s", "give them longer: --timeout"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too
        process.wait()
    answers = []
    for rank in range(mesh.world_size):
        answer = directory / f"answer-{rank}.json"
        answers.append(json.loads(answer.read_text()) if answer.exists() else None)
    _raise_first(answers, mesh, directory)
    return World(mesh, directory, tuple(answers))


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").strip().splitlines() if path.exists() else []


def _raise_first(answers: list[dict[str, Any] | None], mesh: Mesh, directory: Path) -> None:
    failed = [(rank, answer) for rank, answer in enumerate(answers) if answer is None or "error" in answer]
    # What only says that a peer went away tells nothing.
    failed.sort(key=lambda found: found[1] is None or "onnection" in found[1]["error"])
    for rank, answer in failed:
        if answer is None:
            words = [line for name in (f"stderr-{rank}", "stderr") for line in _lines(directory / name)]
            raise ClusterError(f"rank {rank} of {mesh} ended without an answer: {words[-1] if words else 'killed'}")
        if answer["kind"] in _FAILS_TO_RESTORE:
            raise RestoreError(answer["error"], f"rank {rank} of {mesh}")
        raise TrainingFailed(rank, -1, answer["error"], answer["traceback"], f"in the recovery check on {mesh}")
