"""Staging: the copy of a rank's share into its arena slot. This copy is the stall, so little else is done here.

The slot is a file that the node's store made and touched; the rank maps it once, with its pages faulted in. What lies
contiguous in CPU memory is copied by address, past the caches (see memory_copy); strided tensors are copied as integers
by torch. Both let go of the interpreter lock and have copied when ``stage`` returns. CUDA tensors go over a side stream
into the same map, which is registered with the driver once; kernels launched later wait for the copy, the host waits in
``wait``.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch

from elastic.errors import InternalError, SnapshotError
from elastic.protocol.shares import PointInTime, SlotRef, StagedShare
from elastic.snapshot.capture import Attached, Captured
from elastic.snapshot.layout import Box
from elastic.snapshot.memory_copy import Pieces, copy, parts_for
from elastic.snapshot.save_plan import SaveShare
from elastic.snapshot.tensor_layout import bits


@dataclass(slots=True)
class _Batch:
    """What one call of torch copies: parts of live tensors and the bytes of the slot that they go to."""

    device: torch.device
    offsets: list[int] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    lazy: list[tuple[int, Callable[[], torch.Tensor]]] = field(default_factory=list)
    """Sources that must be worked out at each snapshot: lazy conjugates and negatives."""


@dataclass(slots=True)
class _Map:
    """A mapped slot, and the views of it that the plan ``plan_key`` copies to, by batch."""

    identity: tuple[int, int, int]
    data: torch.Tensor
    pinned: bool = False
    plan_key: str = ""
    views: list[list[torch.Tensor]] = field(default_factory=list)


class Stager:
    """Copies shares into slots for one rank, and keeps maps and views from one snapshot to the next.

    Not thread-safe: the thread that trains is the one that stages.
    """

    def __init__(self) -> None:
        self.sent: set[str] = set()
        """Plan keys whose table of pieces a StagedShare has carried."""
        self._maps: dict[str, _Map] = {}
        self._plan_key = ""
        self._held: list[torch.Tensor] = []
        self._parts: list[Pieces] = []
        self._batches: list[_Batch] = []
        self._threads: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, Any] = {}
        self._events: list[Any] = []

    def open(self, slot: SlotRef) -> None:
        """Map ``slot`` with its pages faulted in, ahead of the first snapshot that goes there."""
        self._map(slot)

    def stage(self, captured: Captured, share: SaveShare, slot: SlotRef) -> int:
        """Copy all pieces of ``share`` into ``slot`` and return the bytes used.

        Raises SnapshotError with both sizes if the share does not fit; nothing is copied then. CUDA copies may be in
        flight on return: call ``wait`` before the slot is read.
        """
        if share.nbytes > slot.capacity_bytes:
            raise SnapshotError(
                f"the share takes {share.nbytes} bytes and its slot has {slot.capacity_bytes}",
                slot.path,
                "the store makes larger slots for the next snapshot",
            )
        try:
            mapped = self._map(slot)
        except (OSError, ValueError) as error:
            raise SnapshotError(
                f"the slot cannot be mapped: {error}", slot.path, "is the node's store alive?"
            ) from error
        held = [captured_tensor.tensor for captured_tensor in captured.tensors]
        if share.key != self._plan_key or not all(map(is_, held, self._held)):
            self._plan_key, self._held = "", held
            pieces, self._batches = _sources(captured, share)
            self._parts = parts_for(pieces, torch.get_num_threads())
            self._plan_key = share.key
        for batch in self._batches:
            for index, resolve in batch.lazy:
                batch.sources[index] = resolve()
        if mapped.plan_key != share.key:
            mapped.views = [
                [_view(mapped.data, offset, source) for offset, source in zip(batch.offsets, batch.sources)]
                for batch in self._batches
            ]
            mapped.plan_key = share.key
        self._copy(mapped)
        return share.nbytes

    def wait(self) -> None:
        """Return when all copies of the last ``stage`` are in the slot."""
        for event in self._events:
            event.synchronize()
        self._events = []

    def close(self) -> None:
        """Let go of the maps, of the threads and of every tensor."""
        self.wait()
        for mapped in self._maps.values():
            _unregister(mapped)
        if self._threads is not None:
            self._threads.shutdown()
        self.__init__()  # type: ignore[misc]

    def _map(self, slot: SlotRef) -> _Map:
        status = os.stat(slot.path)
        identity = (status.st_dev, status.st_ino, slot.capacity_bytes)
        known = self._maps.get(slot.path)
        if known is not None and known.identity == identity:
            return known
        if known is not None:
            _unregister(known)
        with open(slot.path, "r+b") as file:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            region = mmap.mmap(file.fileno(), slot.capacity_bytes, flags=flags)
        mapped = self._maps[slot.path] = _Map(identity, torch.frombuffer(region, dtype=torch.uint8))
        return mapped

    def _copy(self, mapped: _Map) -> None:
        for batch, views in zip(self._batches, mapped.views):
            if batch.device.type == "cpu":
                torch._foreach_copy_(views, batch.sources)
            else:
                self._copy_from_device(batch, mapped, views)
        copy(self._parts, mapped.data.data_ptr(), self._pool())

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="stage")
        return self._threads

    def _copy_from_device(self, batch: _Batch, mapped: _Map, views: list[torch.Tensor]) -> None:
        if batch.device.type != "cuda":
            raise InternalError(f"staging from {batch.device} is not implemented")
        if not mapped.pinned:
            _register(mapped)
        cuda: Any = torch.cuda
        side = self._streams.setdefault(batch.device, cuda.Stream(batch.device))
        training = torch.cuda.current_stream(batch.device)
        side.wait_stream(training)
        with torch.cuda.stream(side):
            torch._foreach_copy_(views, batch.sources, non_blocking=True)
        event = cuda.Event()
        event.record(side)
        training.wait_event(event)  # the next step may change the state only after the copy
        self._events.append(event)


def capture_and_stage(
    attached: Attached,
    stager: Stager,
    slot: SlotRef,
    *,
    attempt: str,
    point: PointInTime,
    extra: Mapping[str, object] | None = None,
    ledger: tuple[str, ...] = (),
    resend_plan: bool = False,
) -> StagedShare:
    """Capture the attached state and copy this rank's share into ``slot``: complete on return, the slot is given up.

    The table of pieces goes along the first time that its key is used, or where ``resend_plan`` says that the store
    lost it. Raises CaptureError for what cannot be saved, SnapshotError if the share does not fit the slot.
    """
    started = time.perf_counter()
    captured = attached.capture(extra)
    captured_at = time.perf_counter()
    share = attached.share()
    plan = share.to_bytes() if resend_plan or share.key not in stager.sent else None
    planned_at = time.perf_counter()
    used = stager.stage(captured, share, slot)
    stager.wait()
    ended = time.perf_counter()
    stager.sent.add(share.key)
    return StagedShare(
        attempt=attempt,
        rank=attached.rank,
        world_size=attached.mesh.world_size,
        mesh=attached.mesh.axes,
        point=point,
        slot=slot,
        used_bytes=used,
        plan_key=share.key,
        plan=plan,
        objects=captured.objects,
        ledger=ledger,
        stall_s=ended - started,
        agreements=attached.agreements,
        parts_s={"capture": captured_at - started, "plan": planned_at - captured_at, "copy": ended - planned_at},
    )


def _sources(captured: Captured, share: SaveShare) -> tuple[Pieces, list[_Batch]]:
    """Where all pieces lie: contiguous CPU memory by address, the rest as tensors, by device."""
    places = {found.layout.spec.name: found for found in captured.tensors}
    contiguous: list[tuple[int, int, int]] = []
    batches: dict[torch.device, _Batch] = {}
    for piece in share.pieces:
        found = places[piece.tensor.name]
        tensor = found.tensor
        part = _part(tensor, found.held, piece.box)
        lazy = tensor.is_conj() or tensor.is_neg()
        if tensor.device.type == "cpu" and part.is_contiguous() and not lazy:
            contiguous.append((piece.offset, part.data_ptr(), part.nbytes))
        else:
            batch = batches.setdefault(tensor.device, _Batch(tensor.device))
            if lazy:
                batch.lazy.append((len(batch.sources), partial(bits, part)))
            batch.offsets.append(piece.offset)
            batch.sources.append(bits(part))
    columns = np.array(contiguous, np.int64).reshape(-1, 3).T
    return Pieces(*map(np.ascontiguousarray, columns)), list(batches.values())


def _part(tensor: torch.Tensor, held: Box | None, box: Box) -> torch.Tensor:
    """``box`` of a tensor whose memory holds ``held``."""
    for dim, (start, length) in enumerate(zip(box.offset, box.shape)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start - (held.offset[dim] if held else 0), length)
    return tensor


def _view(slot: torch.Tensor, offset: int, source: torch.Tensor) -> torch.Tensor:
    """The row-major memory at byte ``offset`` of a slot, with dtype and shape of ``source``."""
    return slot[offset : offset + source.nbytes].view(source.dtype).view(source.shape)


def _register(mapped: _Map) -> None:
    """Pin the map's pages and tell the driver, so that copies from the device run beside the host. Once per slot."""
    cuda: Any = torch.cuda
    result = cuda.cudart().cudaHostRegister(mapped.data.data_ptr(), mapped.data.nbytes, 0)
    if int(result) != 0:
        raise SnapshotError(f"CUDA cannot pin {mapped.data.nbytes} bytes of node memory: {result}")
    mapped.pinned = True


def _unregister(mapped: _Map) -> None:
    if mapped.pinned:
        cuda: Any = torch.cuda
        cuda.cudart().cudaHostUnregister(mapped.data.data_ptr())
