"""Which packets a host sends first where many wait for its link: those of control and of small messages, before bulk
data."""

from __future__ import annotations

import socket
from contextlib import suppress

_LOW_DELAY = 0x10
"""Type of service: low delay. Linux's default queue sends such packets first, and many routers do."""
_INTERACTIVE = 6
"""Linux's priority of packets with this type of service."""


def set_urgent(connection: socket.socket, urgent: bool = True) -> None:
    """Have the packets of a connection go before others, or no more, as far as the kernel or a sandbox lets it."""
    service = _LOW_DELAY if urgent else 0
    options = [(socket.IPPROTO_IP, socket.IP_TOS, service)]
    options.append((socket.SOL_SOCKET, socket.SO_PRIORITY, _INTERACTIVE if urgent else 0))
    if connection.family == socket.AF_INET6:  # which may carry IPv4, so both are set
        options.append((socket.IPPROTO_IPV6, socket.IPV6_TCLASS, service))
    for option in options if connection.family in (socket.AF_INET, socket.AF_INET6) else ():
        with suppress(OSError):  # they are a preference alone: the connection works without it
            connection.setsockopt(*option)
