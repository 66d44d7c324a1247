"""The Python stacks of a host's workers, asked for by a signal."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dadt.control.frame import Frame
from dadt.control.schema import OUTPUT
from dadt.launch.processes import is_alive, kill, state

ANSWER_SECONDS = 2.0
"""How long a worker may take that is asked while the job goes on."""
STATES = {"T": "it is stopped", "t": "a debugger holds it", "D": "it hangs in the kernel (a device or a file server)"}

Offers = Mapping[int, tuple[int, int, Path]]
"""Pid to its rank, its signal, and the file into which it then writes its stacks."""


class Stack(NamedTuple):
    """Of all threads of one process; empty if it did not write them in time."""

    rank: int
    pid: int
    text: bytes


class Dump:
    """Advanced until it is complete; never blocks. Each dump is appended to the ones before it."""

    def __init__(self, offers: Offers, seconds: float) -> None:
        """Asks those that live, and waits at most so long."""
        self._offers = {pid: offer for pid, offer in offers.items() if is_alive(pid)}
        self._deadline = time.monotonic() + seconds
        self._begins = {pid: _size(path) for pid, (_, _, path) in self._offers.items()}
        self._sizes: dict[int, int] = {}
        self.complete = not self._offers
        for pid, (_, number, _) in self._offers.items():
            kill([pid], number)

    def advance(self) -> None:
        """A dump has no end mark: it is whole when it has stopped growing from one look to the next."""
        sizes = {pid: _size(path) for pid, (_, _, path) in self._offers.items()}
        grown = all(sizes[pid] > begin for pid, begin in self._begins.items())
        self.complete = self.complete or (grown and sizes == self._sizes) or time.monotonic() >= self._deadline
        self._sizes = sizes

    @property
    def stacks(self) -> list[Stack]:
        return [Stack(rank, pid, self._text(pid, path)) for pid, (rank, _, path) in self._offers.items()]

    def _text(self, pid: int, path: Path) -> bytes:
        try:
            # What a worker has put there instead must not keep the agent waiting, nor lead elsewhere.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return b""
                file.seek(self._begins[pid])
                return file.read(OUTPUT)
        except OSError:
            return b""


class Inquiry:
    """A question for the stacks of some ranks of this host; one frame for each of them answers it."""

    def __init__(self, number: int, ranks: Sequence[int], offers: Offers) -> None:
        self._number = number
        self._ranks = ranks
        self._dump = Dump({pid: offer for pid, offer in offers.items() if offer[0] in ranks}, ANSWER_SECONDS)

    def advance(self) -> list[Frame]:
        """The answers, once all of them are there or late."""
        self._dump.advance()
        return [self._answer(rank) for rank in self._ranks] if self._dump.complete else []

    def _answer(self, rank: int) -> Frame:
        """Several processes of a rank may have offered their stacks."""
        stacks = [stack for stack in self._dump.stacks if stack.rank == rank]
        problems = [_problem(stack.pid) for stack in stacks if not stack.text]
        if not stacks:
            problems = ["it has not imported torch yet, with dadt hooked in, and so cannot tell"]
        heads = [b"process %d:\n" % stack.pid if len(stacks) > 1 else b"" for stack in stacks]
        body = b"\n".join(head + stack.text for head, stack in zip(heads, stacks, strict=True) if stack.text)
        return Frame("stack", {"number": self._number, "rank": rank, "problem": "; ".join(problems)}, body[:OUTPUT])


def _problem(pid: int) -> str:
    if not is_alive(pid):
        return f"process {pid} has ended meanwhile"
    return f"process {pid} did not answer within {ANSWER_SECONDS:g} s: {STATES.get(state(pid), 'nobody knows why')}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
