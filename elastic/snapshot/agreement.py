"""What ranks that hold the same must agree on, told briefly enough for a controller. Pure.

Shares are planned without talking, from what each rank attached. They tile every tensor if all holders of a group of
tensors planned from the same list of names, shapes, dtypes and cuts, so a digest of that list goes along with every
share and a commit compares them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from elastic.mesh import Mesh
from elastic.protocol.shares import Agreement
from elastic.snapshot.layout import Layout, places

PARTS = 8
"""Digests per group of tensors: so that a difference is told among fewer names."""


def agreements(layouts: Sequence[Layout], mesh: Mesh) -> tuple[Agreement, ...]:
    """What this rank's layouts say, for each group of tensors that the same ranks hold, in parts of at most PARTS."""
    groups: dict[tuple[tuple[str, int | tuple[int, ...]], ...], list[Layout]] = {}
    for layout in layouts:
        groups.setdefault(layout.held_at, []).append(layout)
    found = []
    for held_at, members in groups.items():
        held = {axis: len(places(at)) for axis, at in held_at}
        holders = math.prod(held.get(axis, size) for axis, size in mesh.axes)
        who = ", ".join(f"{axis}={at}" for axis, at in held_at)
        run = -(-len(members) // PARTS)
        for part, start in enumerate(range(0, len(members), run)):
            found.append(Agreement(who, part, holders, _told(members[start : start + run])))
    return tuple(found)


def _told(members: Sequence[Layout]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for layout in members:
        spec = layout.spec
        digest.update(repr((spec.name, spec.dtype, spec.shape, layout.cuts)).encode())
    spec = members[0].spec
    more = f" and the {len(members) - 1} after it" if len(members) > 1 else ""
    return f"{spec.name} {spec.dtype}{list(spec.shape)}{more} ({digest.hexdigest()})"
