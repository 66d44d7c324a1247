"""Collects Python stack traces from a host's workers: each worker writes its stack traces to a file when the agent
requests them."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dadt.control.frame import Frame
from dadt.control.job_folder import ASK
from dadt.control.schema import OUTPUT
from dadt.launch.ending.processes import Process, is_alive, state

ANSWER_SECONDS = 2.0
"""Seconds that a worker may take to write its stack traces while the job continues."""
STATES = {"T": "it is stopped", "t": "a debugger holds it", "D": "it hangs in the kernel (a device or a file server)"}

Offers = Mapping[Process, tuple[int, int, Path]]
"""For each process: its rank, the signal on which it writes its stacks, and the file to which it writes them."""


class Stack(NamedTuple):
    """The stack traces of all threads of one process; the text is empty if the process did not write them in time."""

    rank: int
    pid: int
    text: bytes


class Dump:
    """A request to several processes for their stack traces, which each process appends to a file. The caller has to
    call `advance`, which never blocks, until `complete` is set."""

    def __init__(self, offers: Offers, seconds: float) -> None:
        """Send the request to those of the processes that are alive, and wait at most `seconds` for their stack
        traces."""
        self._offers = {process: offer for process, offer in offers.items() if process.is_alive}
        self._deadline = time.monotonic() + seconds
        self._signals_at = time.monotonic() + seconds / 2
        """Time (time.monotonic) at which processes that have not answered also get a signal, because their threads that
        wait for requests apparently cannot get Python's interpreter lock."""
        self._begins = {process: _size(path) for process, (_, _, path) in self._offers.items()}
        self._sizes: dict[Process, int] = {}
        self.complete = not self._offers
        self._silent = set(self._offers)
        for _, _, path in self._offers.values():
            _ask(path)

    def advance(self) -> None:
        """Read what the processes have written so far. The traces have no end mark, so a file counts as complete once
        it stops growing."""
        sizes = {process: _size(path) for process, (_, _, path) in self._offers.items()}
        self._silent = {process for process in self._silent if sizes[process] == self._begins[process]}
        if time.monotonic() >= self._signals_at:
            for process in self._silent:
                process.signal(self._offers[process][1])
            self._silent = set()
        grown = all(sizes[process] > begin for process, begin in self._begins.items())
        self.complete = self.complete or (grown and sizes == self._sizes) or time.monotonic() >= self._deadline
        self._sizes = sizes

    @property
    def stacks(self) -> list[Stack]:
        return [
            Stack(rank, process.pid, self._text(process, path)) for process, (rank, _, path) in self._offers.items()
        ]

    def _text(self, process: Process, path: Path) -> bytes:
        try:
            # A worker may have put a pipe or a symlink at this path, which must not block or mislead the agent.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return b""
                file.seek(self._begins[process])
                return file.read(OUTPUT)
        except OSError:
            return b""


class HostInquiry:
    """The launcher's request for the stack traces of some ranks of this host. It is answered by one frame per rank."""

    def __init__(self, number: int, ranks: Sequence[int], offers: Offers) -> None:
        self._number = number
        self._ranks = ranks
        self._dump = Dump({process: offer for process, offer in offers.items() if offer[0] in ranks}, ANSWER_SECONDS)

    def advance(self) -> list[Frame]:
        """Return one answer per rank once all processes have answered or the time is up; before that, an empty list."""
        self._dump.advance()
        return [self._answer(rank) for rank in self._ranks] if self._dump.complete else []

    def _answer(self, rank: int) -> Frame:
        """Return the answer for a rank, which contains the stack traces of all processes of the rank."""
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


def _ask(path: Path) -> None:
    """Request a worker's stack traces through the named pipe that the worker has created. A worker without such a pipe
    gets a signal later."""
    try:
        pipe = os.open(path.with_suffix(ASK), os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(pipe, "wb", 0) as asked:
            if stat.S_ISFIFO(os.fstat(pipe).st_mode):
                asked.write(b"?")
    except OSError:
        pass  # the worker has no pipe, or ends at this moment


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
