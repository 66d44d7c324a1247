"""As root: python -m benchmarks.zero_copy

Measures whether the kernel sends without a copy (MSG_ZEROCOPY) within a host, and between simulated hosts: what it says
of each send, and the processor time of the sender beside that of ordinary sends.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import socket
import struct
import time
from statistics import median
from typing import NamedTuple

from benchmarks.page import spread, table
from dadt.launch.hosts.simulated import CLONE_NEWNET, Network, SimulatedLink

SO_ZEROCOPY, MSG_ZEROCOPY, MSG_ERRQUEUE = 60, 0x4000000, 0x2000  # Python does not name them
COPIED = 1
"""Code of a notice that the kernel has copied the bytes all the same (SO_EE_CODE_ZEROCOPY_COPIED)."""
NOTICE = struct.Struct("=IBBBBII")
"""struct sock_extended_err, whose last fields are the first and the last send that the notice is about."""
PIECE, PIECES = 1 << 20, 256
NOTICE_SECONDS = 30.0
"""How long the kernel may take to tell of all sends."""


class Sending(NamedTuple):
    seconds: float
    """Processor seconds of the sender."""
    copied: int
    """Number of sends of which the kernel says that it has copied their bytes."""
    told: int
    """Number of sends of which it says anything."""


def _notices(sender: socket.socket) -> tuple[int, int]:
    """Return how many sends were copied and how many are done, of those of which the kernel has told by now."""
    copied = told = 0
    while True:
        try:
            _, ancillary, _, _ = sender.recvmsg(1, 512, MSG_ERRQUEUE | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return copied, told
        _, _, _, code, _, first, last = NOTICE.unpack_from(ancillary[0][2])
        told += last - first + 1
        copied += (last - first + 1) * (code == COPIED)


def send(sender: socket.socket, data: mmap.mmap, without_copy: bool) -> Sending:
    """Send the data many times, and return what that took."""
    sender.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, without_copy)
    begun = time.process_time()
    copied = told = sends = 0
    for _ in range(PIECES):
        at = 0
        while at < PIECE:
            at += sender.send(memoryview(data)[at:], MSG_ZEROCOPY if without_copy else 0)
            sends += 1
        if without_copy:
            more = _notices(sender)
            copied, told = copied + more[0], told + more[1]
    deadline = time.monotonic() + NOTICE_SECONDS
    while without_copy and told < sends:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the kernel has told of {told} of {sends} sends in {NOTICE_SECONDS:g} s")
        more = _notices(sender)
        copied, told = copied + more[0], told + more[1]
        time.sleep(0.001)
    return Sending(time.process_time() - begun, copied, told)


def _receive(listener: socket.socket) -> None:
    """Read all that comes over one connection, in a forked process, and end the process."""
    connection, _ = listener.accept()
    memory = bytearray(PIECE)
    while connection.recv_into(memory):
        pass
    os._exit(0)


def _enter(host: str) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(os.open(host, os.O_RDONLY), CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def compare(address: str, rounds: int, *, receives_on: str = "", sends_on: str = "") -> list[tuple[Sending, Sending]]:
    """Return what sends with a copy and without one took, by turns. receives_on, sends_on: network namespaces."""
    if receives_on:
        _enter(receives_on)
    listener = socket.create_server((address, 0))
    if (child := os.fork()) == 0:
        _receive(listener)
    if sends_on:
        _enter(sends_on)
    data = mmap.mmap(-1, PIECE)
    data.write(os.urandom(PIECE))
    with socket.create_connection(listener.getsockname()) as sender:
        found = [(send(sender, data, False), send(sender, data, True)) for _ in range(rounds)]
    os.waitpid(child, 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero_copy", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    network = Network(SimulatedLink())
    hosts = [network.add()[1].removeprefix("--net=") for _ in range(2)]
    lines = []
    for name, found in (
        ("loopback", compare("127.0.0.1", rounds)),
        ("veth", compare("10.77.0.1", rounds, receives_on=hosts[0], sends_on=hosts[1])),
    ):
        ratios = sorted(without.seconds / ordinary.seconds for ordinary, without in found)
        copied, told = (sum(getattr(without, name) for _, without in found) for name in ("copied", "told"))
        lines.append([name, f"{copied} of {told}", spread(median(ratios), ratios[0], ratios[-1])])
    network.close()
    print(table(["device", "sends that were copied", "processor time / ordinary sends"], lines))


if __name__ == "__main__":
    main()
