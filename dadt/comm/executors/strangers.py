"""Finds connections of this process whose other end is no process of this job, from Linux's /proc tables."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED = "01"
_MOST = 3
"""Largest number of foreign connections that an error text names."""


class Socket(NamedTuple):
    """One line of the kernel's table of TCP connections."""

    mine: str
    other: str
    """Address and port of the other end, in the hexadecimal form of /proc/net/tcp."""
    state: str
    inode: str


def strangers(job: str, is_known: Callable[[bytes], bool]) -> str:
    """Return a description of connections to processes outside the job, as "10.0.0.3:4711 (process 12, nc)"; empty if
    none is found. is_known: whether an address, as bytes, is that of a host of the job."""
    if not job:  # without a job id, the job's processes cannot be distinguished from other ones
        return ""
    table = list(_sockets())
    mine = _inodes("self")
    found = []
    for each in table:
        if each.inode not in mine or each.state != _ESTABLISHED:
            continue
        end = next((one for one in table if (one.mine, one.other) == (each.other, each.mine)), None)
        address, port = _read(each.other)
        if end is None and not is_known(address):
            found.append(_text(address, port))
        elif end is not None and (owner := _owner(end.inode)) is not None and not _is_ours(owner, job):
            found.append(f"{_text(address, port)} (process {owner}, {_name(owner)})")
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + more


def _sockets() -> Iterator[Socket]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, mine, other, state, *_, inode = line.split()[:10]
                yield Socket(mine, other, state, inode)


def _inodes(pid: str) -> set[str]:
    """Return the inode numbers of a process's open sockets; empty if the process belongs to another user."""
    found = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # the descriptor may have been closed in the meantime
                kind, _, inode = str(descriptor.readlink()).partition(":[")
                if kind == "socket":
                    found.add(inode.rstrip("]"))
    return found


def _owner(inode: str) -> int | None:
    """Return the process that has the socket open; None if it is unknown, for example because it belongs to another
    user."""
    pids = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return next((int(pid) for pid in pids if inode in _inodes(pid)), None)


def _is_ours(pid: int, job: str) -> bool:
    with suppress(OSError):
        return f"DADT_JOB={job}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "which has ended"


def _read(text: str) -> tuple[bytes, int]:
    """Convert "address:port" in the kernel's hexadecimal form to an address in network byte order and a port."""
    address, _, port = text.partition(":")
    words = bytes.fromhex(address)
    # the kernel prints each 32-bit word in the host's byte order
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return packed[12:] if packed[:12] == bytes(10) + b"\xff\xff" else packed, int(port, 16)


def _text(address: bytes, port: int) -> str:
    if len(address) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, address)}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, address)}]:{port}"
