"""The chunk tables of shares before they are sealed, by the keys of their plans: what a rank need not send again."""

from __future__ import annotations

import threading

from elastic.errors import SnapshotError
from elastic.snapshot.chunk_table import ChunkTable, table_of_pieces
from elastic.snapshot.save_plan import SaveShare

KEPT_PLANS = 256


class PlanTables:
    """Thread-safe. Of more than ``KEPT_PLANS`` the ones that were added first are forgotten."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._tables: dict[str, ChunkTable] = {}
        self._lock = threading.Lock()

    def of(self, key: str, plan: bytes | None) -> ChunkTable:
        """The table of plan ``key``, whose pack has no name and whose chunks have no digests yet.

        ``plan`` is a ``SaveShare`` as bytes. Raises SnapshotError if it is neither given nor known.
        """
        if (known := self._tables.get(key)) is not None:
            return known
        if plan is None:
            raise SnapshotError("the table of pieces is not known", key, "send the plan with the share")
        share = SaveShare.from_bytes(plan)
        table = table_of_pieces(share.pieces, "unsealed", self._algorithm, share.aliases)
        with self._lock:
            self._tables = dict([*self._tables.items(), (key, table)][-KEPT_PLANS:])
        return table
