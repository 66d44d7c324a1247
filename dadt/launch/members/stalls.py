"""Warns the user about ranks that have waited long for other ranks, and requests the stack traces of all ranks."""

from __future__ import annotations

from pathlib import Path

from dadt.config import Config
from dadt.control.frame import Frame
from dadt.launch.actions import AnswerCaller, Event, Outbox, WriteStacks
from dadt.launch.ending.preemption import ranks
from dadt.launch.members.rendezvous import Rendezvous, named

DUMP_SECONDS = 30.0
"""Minimum seconds between two requests for the stack traces of all ranks because of a stall."""
OWN_INQUIRY = 0
"""Number of the launcher's own requests for stack traces. Requests of other `dadt` commands are numbered from 1."""


def patience(config: Config) -> float:
    """Return the seconds for which ranks wait for a rank that cannot continue."""
    return min(config.timeout, config.stall_warning) if config.on_stall == "abort" else config.timeout


class Stalls:
    """Finds ranks that have waited too long for an answer of the launcher, in one attempt of the job. Ranks that wait
    for each other directly report this themselves."""

    def __init__(self, config: Config, rendezvous: Rendezvous, logs: Path, outbox: Outbox) -> None:
        self._config = config
        self._rendezvous = rendezvous
        self._logs = logs
        self._outbox = outbox
        self._dumped = float("-inf")
        """Time (time.monotonic) of the last request for the stack traces of all ranks."""

    def turn(self, now: float) -> None:
        """Warn the user about ranks that have waited too long, and request the stack traces of all ranks if this is
        configured. Call regularly."""
        for stall in self._rendezvous.stalled(self._config.stall_warning, now):
            who = f"{ranks(stall.ranks)} {'wait' if len(stall.ranks) > 1 else 'waits'}"
            self._outbox.say(f"{who} for {stall.key!r}: {named(stall.missing)}", "warning")
            if self._config.on_stall == "dump" and any(member.step > 0 for member in self._rendezvous.members):
                self._dump(now)

    def dump(self, event: Event) -> None:
        """Handle the request of a rank that has waited long for the stack traces of all ranks."""
        self._dump(event.now)

    def _dump(self, now: float) -> None:
        """Request the stack traces of all ranks. Does nothing within DUMP_SECONDS after the last request, because
        several ranks may stall by the same cause."""
        if now - self._dumped < DUMP_SECONDS:
            return
        self._dumped = now
        self._outbox.say(f"the stacks of all ranks go to {self._logs / 'rank*.stacks'}", "warning")
        living = [member.rank for member in self._rendezvous.members if not member.ended]
        self._outbox.send_all(Frame("stacks", {"number": OWN_INQUIRY, "ranks": living}))

    def stacks(self, event: Event) -> None:
        """Have the stack traces of a rank that is being stopped written to the job's log folder."""
        self._outbox.put(WriteStacks(event.frame["rank"], event.frame.body))

    def stack(self, event: Event) -> None:
        """Handle an agent's answer to a request for a rank's stack traces. They go to the job's log folder, or to the
        `dadt` command that has requested them."""
        frame = event.frame
        if frame["number"] == OWN_INQUIRY:
            self._outbox.put(WriteStacks(frame["rank"], frame.body or frame["problem"].encode()))
        else:
            self._outbox.put(AnswerCaller(frame))
