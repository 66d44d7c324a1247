"""Marks TCP connections that carry control frames and small messages, so that this host sends their packets before bulk
data."""

from __future__ import annotations

import socket
from contextlib import suppress

_LOW_DELAY = 0x10
"""The IP type of service "low delay". Linux's default queue, and many routers, send packets with this type first."""
_INTERACTIVE = 6
"""The socket priority that Linux gives to packets with the type of service "low delay"."""


def set_urgent(connection: socket.socket, urgent: bool = True) -> None:
    """Give the packets of a connection priority over other packets, or end this if `urgent` is false. Has no effect if
    the kernel or a sandbox forbids it."""
    service = _LOW_DELAY if urgent else 0
    options = [(socket.IPPROTO_IP, socket.IP_TOS, service)]
    options.append((socket.SOL_SOCKET, socket.SO_PRIORITY, _INTERACTIVE if urgent else 0))
    if connection.family == socket.AF_INET6:  # an IPv6 socket may carry IPv4, so both options are set
        options.append((socket.IPPROTO_IPV6, socket.IPV6_TCLASS, service))
    for option in options if connection.family in (socket.AF_INET, socket.AF_INET6) else ():
        with suppress(OSError):  # the connection also works without the preference
            connection.setsockopt(*option)
