"""What every object of a run is called in a store, and which names are refused. Pure.

Names order listings and help people; no reader concludes anything from them but where to look for a marker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic.errors import StorageError

_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_ATTEMPT = re.compile(r"g(\d+)-[A-Za-z0-9._-]+")

MARKER = "COMMITTED"
DROPPED = "DROPPED"
"""Says that retention has let go of a snapshot, and when; written before its marker is deleted."""
QUARANTINED = "QUARANTINED"
"""Says that a snapshot failed to restore, and why; until it is gone no run is begun from that snapshot."""


def check_part(part: str) -> str:
    """``part`` itself, if it is fit to be one segment of a name in a store; else StorageError."""
    if not _SAFE.fullmatch(part) or ".." in part:
        raise StorageError(
            "this name cannot be a file's", repr(part), "use letters, digits, '.', '_' and '-', at most 128, no '..'"
        )
    return part


def check_pack(pack: str) -> str:
    """The pack name of a chunk table (relative, every segment safe), or StorageError."""
    for part in pack.split("/"):
        check_part(part)
    return pack


def snapshots_prefix(run: str) -> str:
    """Where all snapshots of ``run`` lie; pack names in chunk tables are relative to this."""
    return f"{check_part(run)}/snapshots/"


def snapshot_directory(step: int, snapshot_id: str) -> str:
    """Directory of one snapshot under ``snapshots_prefix``: ``000000000040-<id>``."""
    return check_part(f"{step:012d}-{snapshot_id}")


def attempt_prefix(run: str, step: int, snapshot_id: str, attempt: str) -> str:
    """Key of the directory of one attempt, without a slash at its end."""
    return f"{snapshots_prefix(run)}{snapshot_directory(step, snapshot_id)}/{check_part(attempt)}"


def marker_key(run: str, step: int, snapshot_id: str) -> str:
    """Key of the marker whose existence makes the snapshot readable."""
    return f"{snapshots_prefix(run)}{snapshot_directory(step, snapshot_id)}/{MARKER}"


def pack_name(rank: int) -> str:
    """File of the chunks that ``rank`` wrote."""
    return f"r{rank:05d}.pack"


def node_pack(attempt: str, rank: int) -> str:
    """What the pack of ``rank`` is called in tables of the node tier."""
    return f"{attempt}/{pack_name(rank)}"


def parse_node_pack(pack: str) -> tuple[str, int]:
    """Attempt and rank of a name made by ``node_pack``."""
    attempt, _, name = pack.rpartition("/")
    return attempt, int(name[1 : -len(".pack")])


def table_name(node: int) -> str:
    """File of the chunk table of the ``node``-th store that uploads."""
    return f"n{node:05d}.chunks.parquet"


def latest_key(run: str) -> str:
    """Key of the hint at the newest snapshot."""
    return f"{check_part(run)}/latest.json"


def pins_prefix(run: str) -> str:
    """Where pins lie: an object named like a snapshot's directory keeps that snapshot."""
    return f"{check_part(run)}/pins/"


def new_snapshot_id(now_s: float, token: str) -> str:
    """An id that tells when the snapshot was opened (for the grace time of a collection), unique by ``token``."""
    return check_part(f"{int(now_s):010x}-{token}")


def opened_at_s(snapshot_id: str) -> float | None:
    """When a snapshot with an id of ``new_snapshot_id`` was opened, seconds since the epoch; None for other ids."""
    head, dash, _ = snapshot_id.partition("-")
    return float(int(head, 16)) if dash and re.fullmatch(r"[0-9a-f]{10}", head) else None


def attempt_name(generation: int, number: int) -> str:
    """Name of the ``number``-th attempt of a generation."""
    return f"g{generation:05d}-{number:06d}"


def generation_of(attempt: str) -> int | None:
    """The generation in a name of ``attempt_name``; None for other names."""
    found = _ATTEMPT.fullmatch(attempt)
    return int(found.group(1)) if found else None


@dataclass(frozen=True, slots=True)
class SnapshotName:
    """A parsed key under ``snapshots_prefix``: directory and what follows it."""

    step: int
    snapshot_id: str
    rest: str

    @property
    def directory(self) -> str:
        """The directory under ``snapshots_prefix``."""
        return snapshot_directory(self.step, self.snapshot_id)


def parse_key(run: str, key: str) -> SnapshotName | None:
    """Take a key of ``run`` apart; None for a key that does not lie in a snapshot's directory."""
    prefix = snapshots_prefix(run)
    if not key.startswith(prefix):
        return None
    directory, slash, rest = key[len(prefix) :].partition("/")
    step, dash, snapshot_id = directory.partition("-")
    if not (slash and dash and step.isdigit() and snapshot_id) or directory != f"{int(step):012d}-{snapshot_id}":
        return None
    return SnapshotName(int(step), snapshot_id, rest)
