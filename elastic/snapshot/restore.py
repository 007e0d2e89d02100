"""Putting a snapshot back into what is attached: checked first, then read in windows, then written.

Nothing live is touched before names, shapes, dtypes and coverage have been found right, and before every chunk has been
verified that lies in this node's memory or goes into memory that is not live yet (an optimizer's state). What else goes
into live memory is verified as well before that, if it fits one window. If it does not, it is verified window by window
(see transfer): if that fails midway, the attached state is marked as broken and refuses to be captured or trained on
until a restore has succeeded.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.errors import ConfigError, ModelMismatch
from elastic.snapshot.capture import Attached
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.component import RESTORED_KINDS, Component, Differences, Saved, Target
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.merge_objects import merged_objects
from elastic.snapshot.names import listing
from elastic.snapshot.restore_plan import WINDOW_BYTES, RestorePlan, plan_restore
from elastic.snapshot.transfer import ChunkSource, Transfer
from elastic.snapshot.tree import decode

__all__ = ["ChunkSource", "RestoreReport", "restore"]


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did. ``dropped`` was saved and is not used, ``new`` is attached and was not saved."""

    step: int
    mode: str
    tier: str = ""
    bytes_from: Mapping[str, int] = field(default_factory=dict)
    """Bytes read by place, where the source tells them apart."""
    restored_bytes: int = 0
    read_bytes: int = 0
    seconds: float = 0.0
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """Where the time went: plan, read (waiting for chunks), copy, load (objects)."""
    cast: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What was given to capture as ``extra``."""


def restore(
    attached: Attached,
    index: SnapshotIndex,
    source: ChunkSource,
    mode: str = "strict",
    window_bytes: int = WINDOW_BYTES,
) -> RestoreReport:
    """Restore ``attached`` from a snapshot that any number of ranks wrote; at most two windows are held besides it.

    ``strict`` is everything or nothing. ``training`` leaves the data cursor alone and casts dtypes. ``weights``
    restores modules only and reports names that one side lacks. Raises ModelMismatch with the names before anything
    live is touched; CorruptSnapshot if chunks are missing or damaged, possibly midway: then ``attached.broken`` is set.
    """
    if mode not in RESTORED_KINDS:
        raise ConfigError("mode", mode, f"use one of {', '.join(RESTORED_KINDS)}")
    with _collector_paused():
        return _restore(attached, index, source, mode, window_bytes)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic collection meanwhile: walking a program's whole heap several times over would take most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _restore(
    attached: Attached, index: SnapshotIndex, source: ChunkSource, mode: str, window_bytes: int
) -> RestoreReport:
    started = time.perf_counter()
    same_mesh = index.mesh.axes == attached.mesh.axes
    whole = same_mesh and not attached.partial
    tree = (
        decode(index.objects.of(attached.rank))
        if whole
        else merged_objects(index.objects, attached.rank if same_mesh else 0)
    )
    saved = _by_component(index.table, tree["components"])
    chosen = [c for c in attached.components if c.kind in RESTORED_KINDS[mode] and c.name in saved]
    differences = Differences()
    targets = [target for component in chosen for target in component.plan(saved[component.name], differences)]
    targets = _one_per_memory(targets, differences)
    new, dropped = _whole_components(attached.components, saved, mode, differences)
    _judge(differences, mode, index.step, bool(targets))
    plan = plan_restore(index.table, [(target.name, target.box) for target in targets], window_bytes)
    planned = time.perf_counter()
    waited_s = _execute(attached, index, source, plan, targets, window_bytes)
    copied = time.perf_counter()
    attached.broken = f"the restore of step {index.step} failed while its objects were loaded"
    for component in chosen:
        component.finish()
    attached.broken = None
    attached.invalidate()
    ended = time.perf_counter()
    return RestoreReport(
        step=index.step,
        mode=mode,
        bytes_from=dict(getattr(source, "bytes_from", {})),
        restored_bytes=plan.copied_bytes,
        read_bytes=plan.read_bytes,
        seconds=ended - started,
        parts_s={
            "plan": planned - started,
            "read": waited_s,
            "copy": copied - planned - waited_s,
            "load": ended - copied,
        },
        cast=tuple(differences.cast),
        dropped=(*dropped, *differences.unexpected),
        new=(*new, *differences.missing),
        notes=(*differences.others, *(() if same_mesh else (f"objects of rank 0 of {index.mesh}",))),
        extra=tree.get("extra", {}),
    )


def _by_component(table: ChunkTable, trees: Mapping[str, Any]) -> dict[str, Saved]:
    """What the snapshot holds, by the name that it was attached under: the first part of every tensor's name."""
    tensors: dict[str, dict[str, Any]] = {name: {} for name in trees}
    aliases: dict[str, dict[str, str]] = {name: {} for name in trees}
    specs = {spec.name: spec for spec in table.specs}
    for spec in table.specs:
        tensors.setdefault(spec.name.split(".", 1)[0], {})[spec.name] = spec
    for alias, name in table.aliases:
        owner = alias.split(".", 1)[0]
        if owner == name.split(".", 1)[0]:
            aliases.setdefault(owner, {})[alias] = name
        else:  # tied across two attached objects: the data counts for both
            tensors.setdefault(owner, {})[alias] = specs[name]
    return {name: Saved(tensors[name], aliases[name], trees[name]) for name in trees}


def _whole_components(
    components: Sequence[Component], saved: Mapping[str, Saved], mode: str, differences: Differences
) -> tuple[list[str], list[str]]:
    """Attached objects without saved state and the other way round: differences, or news where the mode leaves them."""
    wanted = RESTORED_KINDS[mode]
    new = [c.name for c in components if c.kind not in wanted]
    dropped = [c.name for c in components if c.kind not in wanted and c.name in saved]
    differences.missing += [f"{c.name} (all of it)" for c in components if c.kind in wanted and c.name not in saved]
    names = {c.name for c in components}
    for name, state in saved.items():
        kind = state.tree.get("kind") if isinstance(state.tree, dict) else None
        if name not in names:
            if kind in wanted:
                differences.unexpected.append(f"{name} (all of it)")
            else:
                dropped.append(name)
    return new, dropped


def _one_per_memory(targets: Sequence[Target], differences: Differences) -> list[Target]:
    """``targets`` with tied ones once. What is tied here and has two values in the snapshot is a difference."""
    found: dict[object, Target] = {}
    for place, target in enumerate(targets):
        tensor = target.tensor
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else place
        first = found.setdefault(memory, target)
        if first.name != target.name:
            differences.others.append(f"{first.name} and {target.name} are tied here and not in the snapshot")
    return list(found.values())


def _judge(differences: Differences, mode: str, step: int, anything: bool) -> None:
    """Raise ModelMismatch if ``mode`` does not allow these differences; one sentence with every kind of them."""
    problems = []
    if mode != "weights" or not anything:
        if differences.missing:
            problems.append(f"{len(differences.missing)} missing in the snapshot: {listing(differences.missing)}")
        if differences.unexpected:
            problems.append(f"{len(differences.unexpected)} not in this model: {listing(differences.unexpected)}")
    if differences.shapes:
        problems.append(f"{len(differences.shapes)} of another shape: {listing(differences.shapes)}")
    if mode == "strict":
        if differences.cast:
            problems.append(f"{len(differences.cast)} of another dtype: {listing(differences.cast)}")
        problems += differences.others
    if problems:
        raise ModelMismatch(
            f"the snapshot of step {step} belongs to another model: {'; '.join(problems)}",
            f"{mode} restore",
            "use another run name for another model"
            + ("" if mode == "weights" else ", or restore with mode='weights' for a warm start"),
        )


def _execute(
    attached: Attached,
    index: SnapshotIndex,
    source: ChunkSource,
    plan: RestorePlan,
    targets: Sequence[Target],
    window_bytes: int,
) -> float:
    """Fill the targets. Returns the seconds spent waiting for chunks."""
    transfer = Transfer(index.table, source, plan, targets, torch.get_num_threads(), window_bytes)

    def before_live() -> None:
        attached.broken = f"a restore of step {index.step} ended midway"

    transfer.run(before_live)
    return transfer.waited_s
