"""A share from one node tier to another without a socket between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic.protocol.shares import ShareReport
from elastic.snapshot.node_tier import NodeTier, Place
from elastic.storage.blob_store import Buffer


def accept_share(
    tier: NodeTier, attempt: str, rank: int, header: bytes, data: Buffer | Sequence[Buffer]
) -> ShareReport:
    """Hold a replica of a peer's share, whose bytes are ``data``, whole or in parts. See ``NodeTier.receive_share``."""
    parts = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data

    def fill(place: Place) -> None:
        joined = b"".join(map(bytes, parts))
        np.copyto(np.frombuffer(place(header, len(joined)), np.uint8), np.frombuffer(joined, np.uint8))

    return tier.receive_share(attempt, rank, fill)
