"""The files beside the logs to which the stacks of ranks go, when they stall or are stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dadt.control import private_files
from dadt.control.frame import Frame
from dadt.launch.monitor.members import Member
from dadt.launch.monitor.output import Output
from dadt.launch.query import OWN_INQUIRY

DUMP_SECONDS = 30.0
"""Least time between two dumps of all stacks because of a stall."""


class Stacks:
    """The stacks of the ranks in one attempt of the job, which are written to files."""

    def __init__(self, output: Output, say: Callable[[str, str], None]) -> None:
        self._output = output
        self._say = say
        self._dumped = float("-inf")
        """Time at which a worker last asked for the stacks."""
        self.paths: list[Path] = []
        """The files to which stacks were written."""

    def wanted(self, members: Sequence[Member]) -> Frame | None:
        """A stalled rank asks for all stacks. Returns the order to the agents; None where another rank, stalled by the
        same cause, has asked just before."""
        now = time.monotonic()
        if now - self._dumped < DUMP_SECONDS:
            return None
        self._dumped = now
        self._say(f"the stacks of all ranks go to {self._output.stacks(0).with_name('rank*.stacks')}", "warning")
        return Frame("stacks", {"number": OWN_INQUIRY, "ranks": [m.rank for m in members if not m.ended]})

    def write(self, rank: int, text: bytes) -> None:
        path = self._output.stacks(rank)
        try:
            with private_files.open_file(path, "ab", inner=True) as file:  # keeps the stacks of a stall, which say more
                file.write(b"\n" * bool(file.tell()) + text)
        except OSError as error:
            self._say(f"{path} could not be written: {error.strerror}", "warning")
            return
        if path not in self.paths:
            self.paths.append(path)
