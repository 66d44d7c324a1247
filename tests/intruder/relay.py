"""On the way between node 1 and node 0: `python relay.py PORT TARGET TARGET_PORT HOW FILE` passes everything on, record
by record, until FILE is there; then it does to one record of an agent what HOW says: change, repeat, leave-out or swap.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from pathlib import Path

PROOF = {"up": (64,), "down": (48, 32)}
"""Bytes before the first record: what the agent and the launcher say until they know each other."""
LENGTH = struct.Struct(">I")


def read(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = line.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def record(line: socket.socket) -> bytes:
    length = read(line, LENGTH.size)
    return length + read(line, LENGTH.unpack(length)[0])


def carry(source: socket.socket, target: socket.socket, which: str, how: str, file: Path) -> None:
    done = False
    try:
        for count in PROOF[which]:
            target.sendall(read(source, count))
        while True:
            said = record(source)
            if which == "up" and not done and file.exists():
                done = True
                if how == "change":
                    said = said[:-1] + bytes([said[-1] ^ 1])
                elif how == "repeat":
                    said += said
                elif how == "leave-out":
                    continue
                elif how == "swap":
                    said = record(source) + said
            target.sendall(said)
    except (EOFError, OSError):
        pass
    for line in (source, target):
        try:
            line.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def main() -> None:
    port, target, target_port, how, file = sys.argv[1:]
    with socket.create_server(("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        print("up", flush=True)
        while True:
            agent, _ = server.accept()
            try:
                launcher = socket.create_connection((target, int(target_port)))
            except ConnectionRefusedError:  # node 0 is not there yet
                agent.close()
                continue
            for way in ((agent, launcher, "up"), (launcher, agent, "down")):
                threading.Thread(target=carry, args=(*way, how, Path(file)), daemon=True).start()


if __name__ == "__main__":
    main()
