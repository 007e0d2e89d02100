"""Putting a snapshot back into what is attached: checked first, then read in windows, then written.

Nothing live is touched before names, shapes, dtypes and coverage have been found right, and before every chunk has been
verified that lies in this node's memory or goes into memory that is not live yet (an optimizer's state). What else goes
into live memory is verified as well before that, if it fits one window. If it does not, it is verified piece by piece
(see transfer): if that fails midway, the attached state is marked as broken and refuses to be captured or trained on
until a restore has succeeded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.config import RestoreConfig
from elastic.snapshot.capture import Attached
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.component import RESTORED_KINDS, Differences, Saved, Target
from elastic.snapshot.gc_pause import gc_paused
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.judge import Findings, judge, whole_components
from elastic.snapshot.merge_objects import merged_objects
from elastic.snapshot.names import listing
from elastic.snapshot.rank_objects import settle
from elastic.snapshot.restore_plan import WINDOW_BYTES, RestorePlan, plan_restore
from elastic.snapshot.transfer import ChunkSource, Transfer
from elastic.snapshot.tree import decode
from elastic.snapshot.versions import VersionCheck, compare

__all__ = ["ChunkSource", "RestoreReport", "restore"]

MOST_NAMES = 20
"""Names of a kind that the summary of a report lists."""


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
    unchecked: tuple[str, ...] = ()
    """Versions that the snapshot or this process does not know, so that nobody compared them."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What was given to capture as ``extra``."""

    def summary(self) -> dict[str, Any]:
        """What a person should know of it, JSON-able and short whatever the size of the model."""
        names = {"cast": self.cast, "dropped": self.dropped, "new": self.new}
        return {
            "step": self.step,
            "mode": self.mode,
            "tier": self.tier,
            "bytes": self.restored_bytes,
            "bytes_from": {place: nbytes for place, nbytes in self.bytes_from.items() if nbytes},
            "seconds": self.seconds,
            "parts_s": dict(self.parts_s),
            **{what: [*found[:MOST_NAMES]] for what, found in names.items()},
            "counts": {what: len(found) for what, found in names.items()},
            "notes": list(self.notes),
            "unchecked": list(self.unchecked),
        }

    def __str__(self) -> str:
        """One line: the mode, what came from where, and all that is not as it was saved."""
        places = ", ".join(f"{place} {_mib(nbytes)}" for place, nbytes in self.bytes_from.items() if nbytes)
        parts = [f"step {self.step}" + (f" from {self.tier}" if self.tier else "") + f", mode {self.mode}"]
        parts.append(
            f"{_mib(self.restored_bytes)} in {self.seconds:.2g} s" + (f", read from {places}" if places else "")
        )
        parts += self.notes
        for what, found in (("cast", self.cast), ("not used", self.dropped), ("as built", self.new)):
            if found:
                parts.append(f"{what}: {listing(found)}")
        if self.unchecked:
            parts.append(f"versions that are not known and were not compared: {', '.join(self.unchecked)}")
        return "; ".join(parts)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def restore(
    attached: Attached,
    index: SnapshotIndex,
    source: ChunkSource,
    how: RestoreConfig | str = "strict",
    window_bytes: int = WINDOW_BYTES,
    versions: Mapping[str, str] | None = None,
    live: bool = False,
) -> RestoreReport:
    """Restore ``attached`` from a snapshot that any number of ranks wrote; at most two windows are held besides it.

    ``how`` is a mode or more: ``strict`` is everything or nothing, ``training`` leaves the data cursor alone and casts
    dtypes, ``weights`` restores modules only and reports names that one side lacks. ``versions`` are those of this
    process; None compares none. ``live``: the snapshot is that of survivors, numbered among themselves.

    Raises ModelMismatch, VersionMismatch or TopologyMismatch with the names before anything live is touched;
    CorruptSnapshot if chunks are missing or damaged, possibly midway: then ``attached.broken`` is set.
    """
    config = RestoreConfig(mode=how) if isinstance(how, str) else how
    with gc_paused():
        return _restore(attached, index, source, config, window_bytes, versions, live)


def _restore(
    attached: Attached,
    index: SnapshotIndex,
    source: ChunkSource,
    config: RestoreConfig,
    window_bytes: int,
    versions: Mapping[str, str] | None,
    live: bool,
) -> RestoreReport:
    started, mode = time.perf_counter(), config.mode
    same_mesh = index.mesh.axes == attached.mesh.axes
    whole = same_mesh and not attached.partial
    tree = (
        decode(index.objects.of(attached.rank))
        if whole
        else merged_objects(index.objects, attached.rank if same_mesh else 0)
    )
    chosen = [c for c in attached.components if c.kind in RESTORED_KINDS[mode] and c.name in tree["components"]]
    tree, places, as_built = settle(tree, index, chosen, attached.mesh, attached.rank, live)
    chosen = [component for component in chosen if component.name not in as_built]
    saved = _by_component(index.table, tree["components"])
    findings = Findings()
    targets = [target for c in chosen for target in c.plan(saved[c.name], findings.of(c.kind))]
    targets = _one_per_memory(targets, findings.weights)
    whole_components(attached.components, saved, mode, findings)
    if versions is None:
        check = VersionCheck(findings.versions)
    else:
        check = compare(index.versions, versions, findings.versions)
    notes = judge(findings, check, config, index.step, bool(targets))
    plan = plan_restore(index.table, [(target.spec.name, target.box) for target in targets], window_bytes)
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
        cast=findings.cast,
        dropped=(*findings.dropped, *findings.weights.unexpected, *findings.others.unexpected),
        new=(*findings.new, *sorted(as_built), *findings.weights.missing, *findings.others.missing),
        notes=(*notes, *places),
        unchecked=check.unchecked,
        extra=tree.get("extra", {}),
    )


def _by_component(table: ChunkTable, trees: Mapping[str, Any]) -> dict[str, Saved]:
    """What the snapshot holds, by the name that it was attached under: the first part of every tensor's name."""
    tensors: dict[str, dict[str, Any]] = {name: {} for name in trees}
    aliases: dict[str, dict[str, str]] = {name: {} for name in trees}
    owner, held = ".", dict[str, Any]()
    for spec in table.specs:
        if not spec.name.startswith(owner):  # most follow one of the same owner
            owner = spec.name.split(".", 1)[0] + "."
            held = tensors.setdefault(owner[:-1], {})
        held[spec.name] = spec
    specs = {spec.name: spec for spec in table.specs} if table.aliases else {}
    for alias, name in table.aliases:
        owner = alias.split(".", 1)[0]
        if owner == name.split(".", 1)[0]:
            aliases.setdefault(owner, {})[alias] = name
        else:  # tied across two attached objects: the data counts for both
            tensors.setdefault(owner, {})[alias] = specs[name]
    return {name: Saved(tensors[name], aliases[name], trees[name]) for name in trees}


def _one_per_memory(targets: Sequence[Target], differences: Differences) -> list[Target]:
    """``targets`` with tied ones once. What is tied here and has two values in the snapshot is a difference."""
    if len({target.address for target in targets}) == len(targets):
        return list(targets)
    found: dict[object, Target] = {}
    for place, target in enumerate(targets):
        tensor = target.tensor
        memory = (tensor.device, target.address, tensor.shape, tensor.stride()) if tensor.numel() else place
        first = found.setdefault(memory, target)
        if first.spec.name != target.spec.name:
            names = f"{first.spec.name} and {target.spec.name}"
            differences.others.append(f"{names} are tied here and not in the snapshot")
    return list(found.values())


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
