"""Putting a snapshot back into what is attached: checked first, then read in windows, then written.

Nothing live is touched before names, shapes, dtypes and coverage have been found right, and a restore of no more than
one window is verified whole before the first byte is written. A larger one is verified window by window: if that fails
midway, the attached state is marked as broken and refuses to be captured until a restore has succeeded.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from elastic.errors import ConfigError, InternalError, ModelMismatch
from elastic.snapshot.capture import Attached
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.component import RESTORED_KINDS, Component, Differences, Saved, Target
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.names import listing
from elastic.snapshot.restore_plan import WINDOW_BYTES, RestorePlan, plan_restore
from elastic.snapshot.tensor_layout import bits
from elastic.snapshot.tree import decode

DIRECT_BYTES = 128 << 10
"""Chunks of at least so many bytes are worth reading straight into their target."""
THREADED_BYTES = 4 << 20
LOCKED_CHUNK_BYTES = 64 << 10
"""Chunks of fewer bytes are copied without letting go of the interpreter lock: getting it back would take longer."""
_memmove_locked = ctypes.PyDLL(None).memmove
_memmove_locked.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_locked.restype = ctypes.c_void_p

Part = npt.NDArray[np.uint8] | memoryview


class ChunkSource(Protocol):
    """Where the bytes of chunks come from: node memory, a peer, durable storage."""

    def read(self, table: ChunkTable, rows: npt.NDArray[np.int64]) -> Sequence[Part]:
        """The verified bytes of these rows of ``table``, in their order.

        Raises CorruptSnapshot naming tensor, chunk and file if no good copy is left. The parts stay valid until the
        call after the next one: while one window is copied, the next is read.

        A source may also have ``read_into(table, rows, targets)``, which puts the bytes into ``targets`` and checks
        them there; on an error those hold anything.
        """


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
    started = time.perf_counter()
    if mode not in RESTORED_KINDS:
        raise ConfigError("mode", mode, f"use one of {', '.join(RESTORED_KINDS)}")
    same_mesh = index.mesh.axes == attached.mesh.axes
    tree = decode(index.objects.of(attached.rank if same_mesh else 0))
    saved = _by_component(index.table, tree["components"])
    chosen = [c for c in attached.components if c.kind in RESTORED_KINDS[mode] and c.name in saved]
    differences = Differences()
    targets = [target for component in chosen for target in component.plan(saved[component.name], differences)]
    new, dropped = _whole_components(attached.components, saved, mode, differences)
    _judge(differences, mode, index.step, bool(targets))
    index.check_coverage()
    plan = plan_restore(index.table, [(target.name, target.box) for target in targets], window_bytes)
    planned = time.perf_counter()
    waited_s = _execute(attached, index, source, plan, targets)
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


class _Transfer:
    """The chunks of a plan on their way into their targets.

    A chunk that is wanted whole, by a target that takes its bytes as they are, may be read straight into it
    (``read_into``), if everything does not fit one window anyway; all others are read, then copied.
    """

    def __init__(
        self, table: ChunkTable, source: ChunkSource, plan: RestorePlan, targets: Sequence[Target], threads: int
    ) -> None:
        self.table, self.source, self.plan, self.targets = table, source, plan, targets
        self.threads = threads
        self.saved = {spec.name: spec for spec in table.specs}
        address = np.zeros(len(targets), np.int64)
        for number, target in enumerate(targets):
            tensor = target.tensor
            if tensor.device.type == "cpu" and tensor.is_contiguous() and _same_dtype(tensor, self._dtype(target)):
                address[number] = tensor.data_ptr()
        self.plain = plan.flat & (address[plan.target] != 0)
        """Copies between runs of bytes."""
        self.destination = address[plan.target] + plan.target_byte
        whole = self.plain & (plan.nbytes == table.nbytes[plan.rows][plan.source]) & (plan.nbytes >= DIRECT_BYTES)
        wanted_once = np.bincount(plan.source, minlength=len(plan.rows)) == 1
        has_direct = len(plan.windows) > 1 and hasattr(source, "read_into")
        self.direct = whole & wanted_once[plan.source] & has_direct
        """Copies that reading makes unnecessary."""

    def fetch(self, number: int) -> dict[int, Part]:
        """Read window ``number``. Chunks by their position in the plan's rows, without those that went straight in."""
        window, copies = self.plan.windows[number], self.plan.copies[number]
        straight = np.flatnonzero(self.direct[copies]) + copies.start
        if len(straight):
            places = [
                memoryview((ctypes.c_char * size).from_address(address)).cast("B")
                for address, size in zip(self.destination[straight].tolist(), self.plan.nbytes[straight].tolist())
            ]
            rows = self.plan.rows[self.plan.source[straight]]
            self.source.read_into(self.table, rows, places)  # type: ignore[attr-defined]
        left = np.arange(window.start, window.stop)
        left = left[~np.isin(left, self.plan.source[straight])] if len(straight) else left
        parts = self.source.read(self.table, self.plan.rows[left]) if len(left) else ()
        if len(parts) != len(left):
            raise InternalError(f"{len(parts)} chunks came back where {len(left)} were asked for")
        return dict(zip(left.tolist(), parts))

    def put(self, number: int, parts: Mapping[int, Part], helper: ThreadPoolExecutor) -> None:
        """Copy what was read of window ``number`` to its targets."""
        plan, copies = self.plan, self.plan.copies[number]
        arrays = {position: np.frombuffer(part, np.uint8) for position, part in parts.items()}
        base = np.zeros(self.plan.windows[number].stop - self.plan.windows[number].start, np.int64)
        first = self.plan.windows[number].start
        base[np.fromiter(arrays, np.int64, len(arrays)) - first] = np.fromiter(
            (array.__array_interface__["data"][0] for array in arrays.values()), np.int64, len(arrays)
        )
        plain = np.flatnonzero(self.plain[copies] & ~self.direct[copies]) + copies.start
        begin = base[plan.source[plain] - first] + plan.source_byte[plain]
        columns = (self.destination[plain].tolist(), begin.tolist(), plan.nbytes[plain].tolist())
        total = int(plan.nbytes[plain].sum())
        if total < LOCKED_CHUNK_BYTES * len(plain):
            _move(_memmove_locked, *columns)
        elif self.threads > 1 and total > THREADED_BYTES:
            half = int(np.searchsorted(np.cumsum(plan.nbytes[plain]), total // 2))
            other = helper.submit(_move, ctypes.memmove, *(column[half:] for column in columns))
            _move(ctypes.memmove, *(column[:half] for column in columns))
            other.result()
        else:
            _move(ctypes.memmove, *columns)
        for copy in (np.flatnonzero(~self.plain[copies]) + copies.start).tolist():
            target, position = self.targets[int(plan.target[copy])], int(plan.source[copy])
            shape = self.table.box(int(plan.rows[position])).shape
            _put_region(plan, copy, target, arrays[position], shape, self._dtype(target))

    def _dtype(self, target: Target) -> str:
        return self.saved[target.name].dtype


def _execute(
    attached: Attached, index: SnapshotIndex, source: ChunkSource, plan: RestorePlan, targets: Sequence[Target]
) -> float:
    """Read window by window, the next one while one is copied. Returns the seconds spent waiting for chunks."""
    waited = 0.0
    transfer = _Transfer(index.table, source, plan, targets, torch.get_num_threads())
    midway = f"a restore of step {index.step} ended midway"
    if transfer.direct.any():
        attached.broken = midway
    with ThreadPoolExecutor(1, "restore") as reader, ThreadPoolExecutor(1, "restore") as helper:
        reading = [reader.submit(transfer.fetch, number) for number in range(min(1, len(plan.windows)))]
        for number in range(len(plan.windows)):
            started = time.perf_counter()
            parts = reading.pop().result()
            if number + 1 < len(plan.windows):
                reading.append(reader.submit(transfer.fetch, number + 1))
            waited += time.perf_counter() - started
            attached.broken = midway
            transfer.put(number, parts, helper)
    return waited


def _move(
    move: Callable[[int, int, int], object], destinations: list[int], sources: list[int], sizes: list[int]
) -> None:
    for destination, source, size in zip(destinations, sources, sizes):
        move(destination, source, size)


def _put_region(
    plan: RestorePlan, row: int, target: Target, chunk: npt.NDArray[np.uint8], shape: tuple[int, ...], dtype: str
) -> None:
    """One region by way of its elements: into strided memory, another dtype or another device."""
    dims = len(shape)
    extent = plan.extent[row, :dims].tolist()
    source = [slice(a, a + n) for a, n in zip(plan.source_offset[row, :dims].tolist(), extent)]
    place = [slice(a, a + n) for a, n in zip(plan.target_offset[row, :dims].tolist(), extent)]
    saved: torch.dtype = getattr(torch, dtype)
    raw = chunk.reshape(*shape, saved.itemsize)[tuple(source)]
    region = torch.from_numpy(np.array(raw, order="C")).view(saved).view(extent)
    memory = target.tensor[tuple(place)] if dims else target.tensor
    with torch.no_grad():
        if _same_dtype(memory, dtype) and not (memory.is_conj() or memory.is_neg()):
            bits(memory).copy_(bits(region))
        else:
            memory.copy_(region)


def _same_dtype(tensor: torch.Tensor, dtype: str) -> bool:
    return str(tensor.dtype) == f"torch.{dtype}"
