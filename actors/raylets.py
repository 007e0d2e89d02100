"""Whether a node's raylet has died, which its own port tells at once.

The kernel of a machine that lives refuses a connection to a port at which nobody listens, within a millisecond; Ray
itself takes seconds to learn it. A machine that is lost or cut off says nothing, and a raylet that answers says nothing
of its workers: there whoever asks has to find out in another way.
"""

from __future__ import annotations

import asyncio

Raylet = tuple[str, int]
"""Host and port."""


async def refuses(raylet: Raylet, timeout_s: float) -> bool:
    """Whether it refuses a connection: nobody is there. False if it takes it, or if nothing comes back in time."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*raylet), timeout_s)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return False
