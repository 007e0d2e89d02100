"""A snapshot as a directory that ``torch.distributed.checkpoint.load`` reads, written item by item.

It goes through torch's own FileSystemWriter, with a planner that hands out each item from one small buffer. The writer
keeps what it was given until its file is closed, so every item is given in the same memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from elastic.errors import InternalError, RestoreError
from elastic.snapshot.box_stream import BoxStream, Raw, cut
from elastic.snapshot.export import Export, ExportedTensor, ExportReport, new_directory
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.layout import Box
from elastic.snapshot.sources import VerifiedSource

ITEM_BYTES = 32 << 20
"""A larger tensor is written in several items; so much is held at a time."""


def export_dcp(
    index: SnapshotIndex, source: VerifiedSource, chosen: Export, out: str | os.PathLike[str]
) -> ExportReport:
    """Write the tensors, tied names with data of their own (the format has no ties), and the metadata last.

    Loaded as ``{"model": model.state_dict(), …}``, or flat where the export is of the model alone. Raises RestoreError
    for a dtype that this torch lacks, CorruptSnapshot if a chunk has no good copy.
    """
    tensors = (*chosen.tensors, *(tie for tie, _ in chosen.ties))
    planner = _StreamingPlanner(tensors, BoxStream(index.table, source, ITEM_BYTES))
    with new_directory(out) as directory:
        writer = FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=0)
        _save(writer, planner)
        names = tuple(sorted(entry.name for entry in directory.iterdir()))
    notes = (f"tied names, each with data of its own: {len(chosen.ties)}",) if chosen.ties else ()
    nbytes = sum(tensor.spec.nbytes for tensor in tensors)
    return ExportReport(str(out), names, len(tensors), nbytes, chosen.left_out, notes)


def _save(writer: FileSystemWriter, planner: SavePlanner) -> None:
    """What ``dcp.save`` does on a single rank, with errors coming through as they are."""
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [written.wait()])


class _StreamingPlanner(SavePlanner):
    """Plans what is to be written from the names alone, and has each item read only when the writer asks for it."""

    def __init__(self, tensors: tuple[ExportedTensor, ...], stream: BoxStream) -> None:
        self._tensors = tensors
        self._boxes: list[tuple[ExportedTensor, Box]] = [
            (tensor, box) for tensor in tensors for box in (list(cut(tensor.spec, ITEM_BYTES)) or [tensor.spec.box])
        ]
        self._raw: Iterator[Raw] = stream.read([(t.spec.name, box) for t, box in self._boxes if t.spec.nbytes])
        self._asked = 0

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing is taken from a state dict."""

    def create_local_plan(self) -> SavePlan:
        """One item for each box, in the order in which they will be read."""
        return SavePlan([self._item(number) for number in range(len(self._boxes))])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan of the only rank, and the metadata of all tensors."""
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for tensor, box in self._boxes:
            chunks.setdefault(tensor.name, []).append(_chunk(box))
        tensors: dict[str, Any] = {
            tensor.name: TensorStorageMetadata(
                TensorProperties(dtype=_dtype(tensor)), torch.Size(tensor.spec.shape), chunks[tensor.name]
            )
            for tensor in self._tensors
        }
        return all_plans, Metadata(tensors, planner_data={tensor.name: tensor.path for tensor in self._tensors})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The tensor of the next item, in memory that the one after it reuses."""
        tensor, box = self._boxes[self._asked]
        if write_item.index != self._item(self._asked).index:
            raise InternalError(f"item {write_item.index} was asked for out of turn")
        self._asked += 1
        if not tensor.spec.nbytes:
            return torch.empty(box.shape, dtype=_dtype(tensor))
        return torch.from_numpy(next(self._raw)).view(_dtype(tensor)).view(box.shape)

    def _item(self, number: int) -> WriteItem:
        tensor, box = self._boxes[number]
        properties = TensorProperties(dtype=_dtype(tensor))
        return WriteItem(
            MetadataIndex(tensor.name, torch.Size(box.offset)),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(_chunk(box), properties, torch.Size(tensor.spec.shape)),
        )


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


def _dtype(tensor: ExportedTensor) -> torch.dtype:
    found = getattr(torch, tensor.spec.dtype, None)
    if not isinstance(found, torch.dtype):
        raise RestoreError(f"this torch ({torch.__version__}) has no dtype {tensor.spec.dtype}", tensor.name)
    return found
