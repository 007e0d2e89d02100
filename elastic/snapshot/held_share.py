"""One sealed share as a node holds it, and the header by which a peer can hold it too."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, astuple, dataclass, field

from elastic.errors import CorruptSnapshot
from elastic.protocol.shares import Agreement, PointInTime, ShareReport, SlotRef
from elastic.snapshot.chunk_table import ChunkTable
from elastic.snapshot.seal import table_digest

_MAGIC = b"ELSHARE1"
_LENGTHS = struct.Struct("<8sQQQ")


@dataclass(frozen=True, slots=True)
class ShareHeader:
    """A sealed share without its bytes: what a restore, a replica and a commit need of it."""

    attempt: str
    rank: int
    world_size: int
    mesh: tuple[tuple[str, int], ...]
    point: PointInTime
    used_bytes: int
    digest: str
    table: ChunkTable
    objects: bytes
    stall_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    ledger: tuple[str, ...] = ()
    agreements: tuple[Agreement, ...] = ()

    def to_bytes(self) -> bytes:
        """For the way to another node: three parts (JSON, chunk table, objects) with their lengths in front."""
        head = {
            "attempt": self.attempt,
            "rank": self.rank,
            "world_size": self.world_size,
            "mesh": self.mesh,
            "point": asdict(self.point),
            "used_bytes": self.used_bytes,
            "digest": self.digest,
            "stall_s": self.stall_s,
            "parts_s": self.parts_s,
            "ledger": self.ledger,
            "agreements": [astuple(one) for one in self.agreements],
        }
        text, table = json.dumps(head).encode(), self.table.to_parquet_bytes()
        return b"".join((_LENGTHS.pack(_MAGIC, len(text), len(table), len(self.objects)), text, table, self.objects))

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> ShareHeader:
        """Inverse of ``to_bytes``. Raises CorruptSnapshot if the parts do not have the digest of the share."""
        view = memoryview(data)
        try:
            magic, *lengths = _LENGTHS.unpack_from(view)
            if magic != _MAGIC or _LENGTHS.size + sum(lengths) != view.nbytes:
                raise ValueError("lengths do not add up")
            at = _LENGTHS.size
            text, raw_table, objects = (
                view[at + sum(lengths[:i]) : at + sum(lengths[: i + 1])] for i in range(len(lengths))
            )
            head = json.loads(bytes(text))
            header = ShareHeader(
                head["attempt"],
                head["rank"],
                head["world_size"],
                tuple((str(axis), int(size)) for axis, size in head["mesh"]),
                point_from_json(head["point"]),
                head["used_bytes"],
                head["digest"],
                ChunkTable.from_parquet_bytes(raw_table),
                bytes(objects),
                head["stall_s"],
                head["parts_s"],
                tuple(head["ledger"]),
                tuple(Agreement(*one) for one in head["agreements"]),
            )
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise CorruptSnapshot(f"not the header of a share: {error}") from error
        if table_digest(header.table, header.objects) != header.digest:
            raise CorruptSnapshot("the header of a share does not have its digest", f"attempt {header.attempt}")
        return header

    def report(self, drain_s: dict[str, float]) -> ShareReport:
        """What the controller learns of the share."""
        return ShareReport(
            self.attempt,
            self.rank,
            self.point,
            self.used_bytes,
            self.digest,
            self.stall_s,
            drain_s,
            self.ledger,
            dict(self.parts_s),
            self.agreements,
        )


@dataclass(frozen=True, slots=True)
class HeldShare:
    """A share in this node's memory: its header and the slot that its bytes lie in."""

    header: ShareHeader
    slot: SlotRef


def point_from_json(value: dict[str, object]) -> PointInTime:
    """A moment from its JSON form; TypeError or ValueError for anything else."""
    fields = dict(value)
    for name in ("optimizer_steps", "scheduler_steps"):
        pairs = fields.get(name, ())
        if not isinstance(pairs, (list, tuple)):
            raise ValueError(f"{name} is not a list of pairs")
        fields[name] = tuple((str(key), int(count)) for key, count in pairs)
    return PointInTime(**fields)  # type: ignore[arg-type]
