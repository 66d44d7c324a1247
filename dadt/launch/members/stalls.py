"""Ranks that have waited for others for long: what the user reads of them, and the stacks of all ranks."""

from __future__ import annotations

from pathlib import Path

from dadt.config import Config
from dadt.control.frame import Frame
from dadt.launch.actions import AnswerCaller, Event, Outbox, WriteStacks
from dadt.launch.members.rendezvous import Rendezvous

DUMP_SECONDS = 30.0
"""Least number of seconds between two dumps of all stacks because of a stall."""
OWN_INQUIRY = 0
"""The number of the job's own inquiries for stacks; those of callers count from 1."""


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
            *most, last = map(str, sorted(stall.ranks))
            who = f"ranks {', '.join(most)} and {last} wait" if most else f"rank {last} waits"
            awaited = ", ".join(member.named for member in stall.missing)
            self._outbox.say(f"{who} for {stall.key!r}: {awaited}", "warning")
            if self._config.on_stall == "dump" and any(member.step > 0 for member in self._rendezvous.members):
                self._dump(now)

    def dump(self, event: Event) -> None:
        """A stalled rank asks for the stacks of all."""
        self._dump(event.now)

    def _dump(self, now: float) -> None:
        """Have all ranks write their stacks, unless another rank, stalled by the same cause, has asked just before."""
        if now - self._dumped < DUMP_SECONDS:
            return
        self._dumped = now
        self._outbox.say(f"the stacks of all ranks go to {self._logs / 'rank*.stacks'}", "warning")
        ranks = [member.rank for member in self._rendezvous.members if not member.ended]
        self._outbox.send_all(Frame("stacks", {"number": OWN_INQUIRY, "ranks": ranks}))

    def stacks(self, event: Event) -> None:
        """A rank has written its stacks as it was stopped."""
        self._outbox.put(WriteStacks(event.frame["rank"], event.frame.body))

    def stack(self, event: Event) -> None:
        """An agent answers for a rank that was asked for its stacks."""
        frame = event.frame
        if frame["number"] == OWN_INQUIRY:
            self._outbox.put(WriteStacks(frame["rank"], frame.body or frame["problem"].encode()))
        else:
            self._outbox.put(AnswerCaller(frame))
