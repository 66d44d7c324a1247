"""Warns the user of ranks that have waited long for other ranks, and requests the stacks of all ranks."""

from __future__ import annotations

from pathlib import Path

from dadt.config import Config
from dadt.control.frame import Frame
from dadt.launch.actions import AnswerCaller, Event, Outbox, WriteStacks
from dadt.launch.ending.preemption import ranks
from dadt.launch.members.rendezvous import Rendezvous, named

DUMP_SECONDS = 30.0
"""Least number of seconds between two dumps of all stacks because of a stall."""
OWN_INQUIRY = 0
"""Number of the job's own requests for stacks; requests of outside callers are numbered from 1."""


class Stalls:
    """Finds waits in the launcher that take too long. One object per attempt of the job. Waits between ranks themselves
    are reported by those ranks, not here."""

    def __init__(self, config: Config, rendezvous: Rendezvous, logs: Path, outbox: Outbox) -> None:
        self._config = config
        self._rendezvous = rendezvous
        self._logs = logs
        self._outbox = outbox
        self._dumped = float("-inf")
        """Time (time.monotonic) of the last dump of all stacks."""

    def turn(self, now: float) -> None:
        """Warn of waits that have taken too long, with a dump of all stacks if so configured. Call regularly."""
        for stall in self._rendezvous.stalled(self._config.stall_warning, now):
            who = f"{ranks(stall.ranks)} {'wait' if len(stall.ranks) > 1 else 'waits'}"
            self._outbox.say(f"{who} for {stall.key!r}: {named(stall.missing)}", "warning")
            if self._config.on_stall == "dump" and any(member.step > 0 for member in self._rendezvous.members):
                self._dump(now)

    def dump(self, event: Event) -> None:
        """Handle a stalled rank's request for the stacks of all ranks."""
        self._dump(event.now)

    def _dump(self, now: float) -> None:
        """Have all ranks write their stacks, unless they did so less than DUMP_SECONDS ago: several ranks may stall by
        the same cause."""
        if now - self._dumped < DUMP_SECONDS:
            return
        self._dumped = now
        self._outbox.say(f"the stacks of all ranks go to {self._logs / 'rank*.stacks'}", "warning")
        living = [member.rank for member in self._rendezvous.members if not member.ended]
        self._outbox.send_all(Frame("stacks", {"number": OWN_INQUIRY, "ranks": living}))

    def stacks(self, event: Event) -> None:
        """Have the stacks of a rank that was stopped written to the job's logs."""
        self._outbox.put(WriteStacks(event.frame["rank"], event.frame.body))

    def stack(self, event: Event) -> None:
        """Handle an agent's answer to a request for a rank's stacks: write it to the logs, or pass it on to the
        caller."""
        frame = event.frame
        if frame["number"] == OWN_INQUIRY:
            self._outbox.put(WriteStacks(frame["rank"], frame.body or frame["problem"].encode()))
        else:
            self._outbox.put(AnswerCaller(frame))
