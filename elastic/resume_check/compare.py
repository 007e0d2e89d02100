"""The verdict of a recovery check: what was saved, what came back on each mesh, and what the next steps made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.data.ledger import LedgerRow, digest_of
from elastic.mesh import Mesh
from elastic.resume_check.contract import ErrorContract, relative
from elastic.resume_check.worlds import World
from elastic.snapshot.box_stream import BoxStream, cut
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.reader import SnapshotCatalog

_FLOATS = {"float64": "f8", "float32": "f4", "float16": "f2"}


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. ``ok`` is None where there was nothing to compare, and ``detail`` says why."""

    what: str
    where: str
    ok: bool | None
    detail: str
    difference: float | None = None
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """All comparisons. The snapshot resumes if none failed."""

    run: str
    step: int
    snapshot: str
    meshes: tuple[str, ...]
    contract: ErrorContract
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok is not False for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """JSON-able values."""
        return {**asdict(self), "verdict": "resumes" if self.ok else "does not resume", "ok": self.ok}


@dataclass(frozen=True, slots=True)
class Journal:
    """What the run itself told of the steps after the snapshot: loss by turn, and its ledger rows by turn."""

    losses: Mapping[int, float]
    rows: Mapping[int, Sequence[LedgerRow]]


def checks_of(
    catalog: SnapshotCatalog,
    ref: SnapshotRef,
    index: SnapshotIndex,
    worlds: Sequence[World],
    contract: ErrorContract,
    journal: Journal,
) -> Iterator[Check]:
    """Every comparison, the snapshot first. ``worlds[0]`` has the mesh of the snapshot, if that could be tried."""
    own = worlds[0]
    for world in worlds:
        yield from _restored(catalog, ref, index, world)
    yield from _against_the_run(own, index.mesh, contract, journal)
    for world in worlds[1:]:
        yield from _next_steps(own, world, contract)


def _restored(catalog: SnapshotCatalog, ref: SnapshotRef, index: SnapshotIndex, world: World) -> Iterator[Check]:
    where, different, names = str(world.mesh), [], 0
    specs, aliases = {spec.name: spec for spec in index.table.specs}, dict(index.table.aliases)
    stream = BoxStream(index.table, catalog.source(ref))
    for name, _, data in world.tensors(0):
        spec = specs.get(aliases.get(name, name))
        names += 1
        if spec is None or spec.shape != data.shape[:-1] or spec.itemsize != data.shape[-1]:
            different.append(name)
            continue
        boxes = list(cut(spec))  # put together they are the tensor, row-major
        at, flat = 0, data.reshape(-1)
        for part in stream.read([(spec.name, box) for box in boxes]):
            if not np.array_equal(part, flat[at : at + len(part)]):
                different.append(name)
                break
            at += len(part)
    yield Check(
        "parameters and optimizer state",
        where,
        not different,
        f"{names} tensors bit for bit" if not different else f"differ: {', '.join(different[:5])}",
    )
    boundary, point = world.answers[0]["boundaries"][0], index.point
    for what, here, there in (
        ("optimizer step", boundary["optimizer_steps"], dict(point.optimizer_steps)),
        ("scheduler step", boundary["scheduler_steps"], dict(point.scheduler_steps)),
        ("data cursor", boundary["cursor"], point.data_cursor),
        ("token cursor", (boundary["samples_seen"], boundary["tokens_seen"]), (point.samples_seen, point.tokens_seen)),
    ):
        detail = _told(here) if here == there else f"{_told(here)}, saved {_told(there)}"
        yield Check(what, where, here == there, detail)
    yield from _objects(index, world)


def _objects(index: SnapshotIndex, world: World) -> Iterator[Check]:
    """Schedulers, scalers, loaders and other objects: the trees are those that were saved."""
    saved = json.loads(index.objects.of(0))["components"]
    here = json.loads(world.objects(0))["components"]
    for name in sorted(saved):
        kind = str(saved[name].get("kind"))
        if kind in ("model", "optimizer") or name == "run" or "per_rank" in saved[name]:
            continue
        same = here.get(name, {}).get("state") == saved[name].get("state")
        yield Check(f"{kind} state", str(world.mesh), same, f"{name} as it was saved" if same else f"{name} differs")


def _against_the_run(own: World, mesh: Mesh, contract: ErrorContract, journal: Journal) -> Iterator[Check]:
    """The same mesh beside what the run itself wrote of the steps after the snapshot."""
    where, turns = f"{own.mesh} and the run", len(own.answers[0]["turns"])
    known = [turn for turn in range(turns) if journal.rows.get(turn)]
    wrong: list[str] = []
    for turn in known:
        ids, rows = own.sample_ids(turn), sorted(journal.rows[turn], key=lambda row: row.start)
        first = rows[0].start
        wrong += [
            f"step {row.step}, rank {row.rank}"
            for row in rows
            if digest_of(np.array(ids[row.start - first : row.stop - first], np.int64)) != row.digest
        ]
    if known:
        told = f"the ids of {_steps(len(known))} have the digests of the ledger"
        yield Check("sample ids", where, not wrong, told if not wrong else f"differ: {', '.join(wrong[:5])}")
    else:
        yield Check("sample ids", where, None, "the run's ledger has no step after the snapshot")
    pairs = []
    for turn in range(turns):
        reported = own.answers[0]["turns"][turn].get("reported", {}).get("loss")
        if reported is not None and turn in journal.losses and own.mesh == mesh:
            pairs.append((reported, journal.losses[turn]))
    if pairs:
        yield _within("loss", where, pairs, contract.loss)
    else:
        yield Check("loss", where, None, "the run's journal has no loss of a step after the snapshot")


def _next_steps(own: World, other: World, contract: ErrorContract) -> Iterator[Check]:
    where = f"{own.mesh} and {other.mesh}"
    turns = min(len(own.answers[0]["turns"]), len(other.answers[0]["turns"]))
    same_ids = all(own.sample_ids(turn) == other.sample_ids(turn) for turn in range(turns))
    count = len(own.sample_ids(0))
    if count:
        yield Check("sample ids", where, same_ids, f"{count} samples a step, {_steps(turns)}, in the same order")
    losses = [(own.metric("loss", turn), other.metric("loss", turn)) for turn in range(turns)]
    pairs = [(a, b) for a, b in losses if a is not None and b is not None]
    if pairs:
        yield _within("loss", where, pairs, contract.loss)
    else:
        yield Check("loss", where, None, "the train function reports no loss: run.report(loss=loss)")
    yield from _outputs(own, other, where, contract.outputs)
    yield from _gradients(own, other, where, contract.gradient_norm)
    yield _update(own, other, where, contract.update)
    ours, theirs = own.answers[0]["boundaries"][-1], other.answers[0]["boundaries"][-1]
    differing = sorted(name for name in ours if ours[name] != theirs[name])
    told = f"optimizer and scheduler steps, cursor and tokens after {_steps(turns)}"
    yield Check("counters", where, not differing, told if not differing else f"differ: {', '.join(differing)}")
    yield _generators(own, other, where, turns)


def _outputs(own: World, other: World, where: str, tolerance: float) -> Iterator[Check]:
    ours, theirs = own.outputs(), other.outputs()
    for name in sorted(ours):
        if name not in theirs or ours[name].shape != theirs[name].shape or not ours[name].size:
            yield Check(f"outputs of {name}", where, None, "not one forward pass a step, with a row for each sample")
            continue
        yield _judged(f"outputs of {name}", where, _norm_of_difference([(ours[name], theirs[name])]), tolerance)


def _gradients(own: World, other: World, where: str, tolerance: float) -> Iterator[Check]:
    ours, theirs = own.gradients(0), other.gradients(0)
    if not ours or ours.keys() != theirs.keys():
        yield Check("gradient norm", where, None if not ours else False, "not the same parameters have gradients")
        return
    norms = [math.sqrt(sum(found["square"] for found in side.values())) for side in (ours, theirs)]
    difference = relative(*norms)
    worst = max(ours, key=lambda name: relative(ours[name]["square"], theirs[name]["square"]))
    each = relative(math.sqrt(ours[worst]["square"]), math.sqrt(theirs[worst]["square"]))
    detail = f"{norms[0]:.6g} and {norms[1]:.6g}; of one parameter at most {each:.2g} apart ({worst})"
    yield Check("gradient norm", where, difference <= tolerance, detail, difference, tolerance)


def _update(own: World, other: World, where: str, tolerance: float) -> Check:
    """What the next step added to each float tensor of the models, on one mesh and on the other."""
    before = own.tensors(0)
    pairs = []
    for (name, dtype, start), (_, _, ours), (_, _, theirs) in zip(before, own.tensors(1), other.tensors(1)):
        if dtype in _FLOATS and ".state." not in name:
            first, a, b = (_numbers(part, dtype) for part in (start, ours, theirs))
            pairs.append((a - first, b - first))
    if not pairs:
        return Check("next update", where, None, "no tensor of a float dtype that numpy knows")
    return _judged("next update", where, _norm_of_difference(pairs), tolerance)


def _generators(own: World, other: World, where: str, turns: int) -> Check:
    """Ranks at one coordinate draw the same numbers, whatever the others do."""
    ours = {tuple(sorted(answer["coordinate"].items())): answer for answer in own.answers}
    shared = [(ours[key], answer) for answer in other.answers if (key := _place(answer)) in ours]
    if not shared:
        return Check("generators", where, None, "no coordinate is on both meshes")
    same = all(
        a["turns"][turn]["generators"] == b["turns"][turn]["generators"] for a, b in shared for turn in range(turns)
    )
    return Check("generators", where, same, f"of {len(shared)} coordinates that both have, {_steps(turns)}")


def _place(answer: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(answer["coordinate"].items()))


def _numbers(data: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float64]:
    return np.ascontiguousarray(data).view(_FLOATS[dtype]).astype(np.float64)


def _norm_of_difference(pairs: Sequence[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]) -> float:
    apart = math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs))
    size = math.sqrt(sum(float((a**2).sum()) for a, _ in pairs))
    return 0.0 if apart == 0.0 else apart / size if size else math.inf


def _within(what: str, where: str, pairs: Sequence[tuple[float, float]], tolerance: float) -> Check:
    difference = max(relative(a, b) for a, b in pairs)
    told = ", ".join(f"{a:.6g}" for a, _ in pairs)
    detail = f"{told} in {_steps(len(pairs))}, at most {difference:.2g} apart"
    return Check(what, where, difference <= tolerance, detail, difference, tolerance)


def _judged(what: str, where: str, difference: float, tolerance: float) -> Check:
    return Check(what, where, difference <= tolerance, f"{difference:.2g} apart", difference, tolerance)


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
