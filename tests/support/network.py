"""Network namespaces on one machine, joined by a bridge: nodes that can be cut off without a reset, and slow links.

Needs root, and iproute2. Whatever is made bears the name of its Network and is removed when it is closed, with every
process that still runs inside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

GONE_S = 10.0


def why_not() -> str:
    """Why no namespaces can be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces need iproute2"
    name = f"ray-elastic-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


class Network:
    """``address`` is that of this machine on the bridge; ``add`` makes a place of its own behind it."""

    def __init__(self) -> None:
        self._name = f"re{os.getpid() % 100_000}"
        self._net = _free_net(os.getpid())
        self._places: dict[str, str] = {}
        self.address = f"{self._net}.1"

    def begin(self) -> None:
        """Make the bridge."""
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    @property
    def _bridge(self) -> str:
        return f"{self._name}b"

    def add(self) -> str:
        """The address of a new namespace."""
        number = len(self._places) + 2
        place, address = f"{self._name}n{number}", f"{self._net}.{number}"
        self._places[address] = place
        _ip("netns", "add", place)
        _ip("link", "add", self._link(address), "type", "veth", "peer", "name", "eth0", "netns", place)
        _ip("-n", place, "link", "set", "lo", "up")
        _ip("-n", place, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", place, "link", "set", "eth0", "up")
        _ip("link", "set", self._link(address), "up")
        self.heal(address)
        return address

    def inside(self, address: str, *command: str) -> list[str]:
        """``command`` as it has to be called to run there."""
        return ["ip", "netns", "exec", self._places[address], *command]

    def processes(self, address: str) -> list[int]:
        """The processes that run there."""
        return [int(pid) for pid in _ip("netns", "pids", self._places[address]).split()]

    def cut(self, address: str) -> float:
        """From now on nothing gets there or away: packets vanish, connections stay open. The moment it was done."""
        at = time.monotonic()
        _ip("link", "set", self._link(address), "nomaster")
        return at

    def heal(self, address: str) -> None:
        """Undo ``cut``."""
        _ip("link", "set", self._link(address), "master", self._bridge)

    def slow(self, address: str, kilobits_per_s: int) -> None:
        """Let no more through, either way."""
        rate = ["root", "tbf", "rate", f"{kilobits_per_s}kbit", "burst", "16kb", "latency", "400ms"]
        _tc("qdisc", "replace", "dev", self._link(address), *rate)
        _tc("-n", self._places[address], "qdisc", "replace", "dev", "eth0", *rate)

    def held_back(self, address: str) -> int:
        """How many packets had to wait for a slow link to that place."""
        words = _tc("-s", "qdisc", "show", "dev", self._link(address)).split()
        return int(words[words.index("overlimits") + 1])

    def fast(self, address: str) -> None:
        """Undo ``slow``."""
        _tc("qdisc", "del", "dev", self._link(address), "root")
        _tc("-n", self._places[address], "qdisc", "del", "dev", "eth0", "root")

    def close(self) -> None:
        """End what runs in the namespaces, and remove them."""
        for address, place in self._places.items():
            with contextlib.suppress(AssertionError):  # it was not made
                self._end_processes(address)
            for made in (("link", "del", self._link(address)), ("netns", "del", place)):
                with contextlib.suppress(AssertionError):
                    _ip(*made)
        with contextlib.suppress(AssertionError):
            _ip("link", "del", self._bridge)

    def _end_processes(self, address: str) -> None:
        end = time.monotonic() + GONE_S
        while (left := self.processes(address)) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _link(self, address: str) -> str:
        return f"{self._places[address]}h"


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A Network for the block."""
    made = Network()
    try:
        made.begin()
        yield made
    finally:
        made.close()


def _free_net(seed: int) -> str:
    """The first three numbers of a net that nobody uses here, of those set aside for tests of networks (RFC 2544)."""
    taken = _ip("-4", "address")
    return next(net for k in range(256) if f" {(net := f'198.18.{(seed + k) % 256}')}." not in taken)


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _tc(*arguments: str) -> str:
    return _call("tc", *arguments)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout
