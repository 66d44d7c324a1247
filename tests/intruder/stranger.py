"""On a host of its own: `python stranger.py ADDRESS...` looks for all ports of the job, and speaks to each
what DADT and its libraries speak, as well as one can who does not know the job's secret. Prints what it found, as JSON.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta

PORTS = (*range(29000, 30000), *range(32768, 61000))
"""Where jobs and the kernel choose."""
AT_ONCE = 512
FLOOD = 400
GREETING = b"\0DADT2 launcher\n"
KEYS = (b"", hashlib.sha256(b"").digest(), b"\0" * 32)
"""That somebody may have forgotten to choose."""


def listening(address: str) -> Iterator[int]:
    """Where something accepts."""
    with selectors.DefaultSelector() as selector:
        ports = iter(PORTS)
        pending = 0
        while True:
            while pending < AT_ONCE and (port := next(ports, None)) is not None:
                line = socket.socket()
                line.setblocking(False)
                if line.connect_ex((address, port)) not in (0, errno.EINPROGRESS):
                    line.close()
                    continue
                selector.register(line, selectors.EVENT_WRITE, port)
                pending += 1
            if not pending:
                return
            for key, _ in selector.select(5.0):
                line = key.fileobj
                assert isinstance(line, socket.socket)
                selector.unregister(line)
                pending -= 1
                if line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    yield key.data
                line.close()


def dialled(address: str, port: int) -> socket.socket:
    line = socket.create_connection((address, port), 5.0)
    line.settimeout(1.0)
    return line


def greeted(address: str, port: int) -> bool:
    """Whether a launcher of DADT's is there."""
    with closing(dialled(address, port)) as line, suppress(OSError):
        return line.recv(48).startswith(GREETING)
    return False


def proof(key: bytes, role: bytes, ours: bytes, theirs: bytes) -> bytes:
    return hmac.digest(key, b"dadt proof " + role + b"\0" + ours + theirs, "sha256")


def answers(line: socket.socket) -> bool:
    """Whether anything comes before the other side hangs up."""
    with suppress(OSError):
        return bool(line.recv(1))
    return False


def knock(address: str, port: int) -> int:
    """All that can be said to a launcher without its key; how often it answered."""
    got_in = 0
    recorded = b""
    for key in KEYS:
        with closing(dialled(address, port)) as line:
            ours, theirs = line.recv(48), os.urandom(32)
            recorded = theirs + proof(key, b"agent", ours, theirs)
            line.sendall(recorded)
            got_in += answers(line)
    said = [
        recorded,  # a proof of another connection
        os.urandom(32) + recorded[32:],
        struct.pack(">I", 1 << 30) + b"{" * 100_000,
        b'{"kind": "end"}' * 1000,
        b"\n\0DADT1\0\n" + struct.pack(">II", 40, 1 << 30) + b'{"kind": "end", "stuck": [], "signal": 0}',
    ]
    for text in said:
        with closing(dialled(address, port)) as line:
            line.recv(48)
            with suppress(OSError):
                line.sendall(text)
            got_in += answers(line)
    return got_in


def reflect(address: str, port: int) -> bool:
    """Give a launcher its own words as those of an agent, over two connections."""
    with closing(dialled(address, port)) as one, closing(dialled(address, port)) as other:
        mine = other.recv(48)
        one.recv(48)
        one.sendall(mine[16:] + mine[16:])
        return answers(one)


def is_store(address: str, port: int) -> bool:
    """Whether torch's key-value store is there, which asks nobody for a proof."""
    from torch.distributed import TCPStore

    found = threading.Event()

    def ask() -> None:
        with suppress(RuntimeError):
            store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=1))
            store.set("stranger", "was here")
            if store.get("stranger"):
                found.set()

    # In a thread: it waits for ever where something else listens that does not answer.
    threading.Thread(target=ask, daemon=True).start()
    return found.wait(2.0)


def flood(address: str, port: int) -> None:
    """Many connections at once that say nothing, half a word, or too much."""
    lines = []
    try:
        for number in range(FLOOD):
            with suppress(OSError):
                line = dialled(address, port)
                lines.append(line)
                line.setblocking(False)
                line.send((b"", b"GET ", os.urandom(4096), struct.pack("<Q", number))[number % 4])
        time.sleep(0.5)  # for as long as they are held, the job has to do without
    finally:
        for line in lines:
            line.close()


def main() -> None:
    found: dict[str, dict[str, object]] = {}
    for address in sys.argv[1:]:
        for port in listening(address):
            if port == 22:
                continue
            try:
                launcher = greeted(address, port)
            except ConnectionRefusedError:
                continue  # it was open for a moment only: a connection's own end, or a probe
            found[f"{address}:{port}"] = {
                "launcher": launcher,
                "got in": knock(address, port) + reflect(address, port) if launcher else 0,
                "store": not launcher and is_store(address, port),
            }
            flood(address, port)
    print(json.dumps(found), flush=True)
    os._exit(0)  # whatever still waits in torch


if __name__ == "__main__":
    main()
