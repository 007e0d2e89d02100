"""What a rank can do about itself when others cannot be reached: break its connections, and show its stacks.

A collective with a node that is silent, without a reset, waits until the kernel gives up, which takes minutes; nothing
that torch offers ends that wait for gloo. Shutting the sockets down does, within milliseconds: the peers' end looks
closed, as it would if they had died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import tempfile
import threading


def cut_connections(address: str) -> int:
    """Shut down every TCP connection of this process with ``address``. Returns how many there were."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as ours:
                if ours.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if ours.getpeername()[0].removeprefix("::ffff:") == address:
                    ours.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def own_stacks() -> str:
    """The stacks of all threads of this process, in the shape of py-spy's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return reshaped(file.read(), names)


def reshaped(text: str, names: dict[int | None, str]) -> str:
    """What faulthandler writes, as paragraphs of ``function (file:line)`` below a thread's name in quotes."""
    lines = []
    for line in text.splitlines():
        head, _, rest = line.partition(" 0x")
        if head in ("Thread", "Current thread") and rest:
            ident = int(rest.split()[0], 16)
            lines.append(f'\nThread 0x{ident:x}: "{names.get(ident, "unknown")}"')
        elif line.lstrip().startswith('File "'):
            file, _, after = line.strip().removeprefix('File "').partition('", line ')
            number, _, function = after.partition(" in ")
            lines.append(f"    {function} ({file}:{number})")
    return "\n".join(lines) + "\n"
