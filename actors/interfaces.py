"""Which network interface of this machine has an address.

gloo looks its own address up by the machine's name, which on many machines (Debian's /etc/hosts) is a loopback address
that no other node can reach. Ray knows the address at which a node is reached; what torch can be told is an interface.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912
_REQUEST_BYTES = 40
"""``struct ifreq``: 16 bytes of name, then a socket address, whose IPv4 address begins at byte 20."""
_ROOM = 1024 * _REQUEST_BYTES
_IPV6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str:
    """The name of the interface that has ``address``; empty if none of this machine has it."""
    wanted = ipaddress.ip_address(address)
    return next((name for name, found in _addresses() if found == wanted), "")


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    room = array.array("B", bytes(_ROOM))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _SIOCGIFCONF, struct.pack("iL", _ROOM, room.buffer_info()[0]))
    data = room.tobytes()[: struct.unpack("iL", answer)[0]]
    found: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    for start in range(0, len(data), _REQUEST_BYTES):
        request = data[start : start + _REQUEST_BYTES]
        found.append((request[:16].split(b"\0")[0].decode(), ipaddress.IPv4Address(request[20:24])))
    if _IPV6.exists():
        lines = [line.split() for line in _IPV6.read_text().splitlines()]
        found += [(words[-1], ipaddress.IPv6Address(bytes.fromhex(words[0]))) for words in lines]
    return found
