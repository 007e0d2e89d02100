"""Which network interface of this machine has an address.

gloo looks its own address up by the machine's name, which on many machines (Debian's /etc/hosts) is a loopback address
that no other node can reach. Ray knows the address at which a node is reached; what torch can be told is an interface.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def interface_of(address: str) -> str:
    """The name of the interface that has ``address``; empty if none of this machine has it."""
    wanted = ipaddress.ip_address(address)
    for name, has in psutil.net_if_addrs().items():
        for one in has:
            # The scope behind the % says what the interface's name says.
            if one.family in _FAMILIES and ipaddress.ip_address(one.address.partition("%")[0]) == wanted:
                return name
    return ""
