"""What the workers report of their training: it goes into the outcome of the job."""

from __future__ import annotations

from collections.abc import Sequence

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox
from dadt.launch.ending.outcome import Outcome
from dadt.launch.members.member import Member


class Results:
    """Fills in the outcome as the reports come."""

    def __init__(self, outcome: Outcome, members: Sequence[Member], outbox: Outbox) -> None:
        self._outcome = outcome
        self._members = members
        self._outbox = outbox

    def hello(self, event: Event) -> None:
        """A process has imported torch, with DADT hooked in."""
        self._outcome.hooked = True

    def done(self, event: Event) -> None:
        """A rank has come to the end of its training, with this summary."""
        rank = event.frame["rank"]
        if not self._members[rank].lost:
            self._outcome.summaries = {**self._outcome.summaries, rank: event.frame["summary"]}
            self._members[rank].finished = True

    def result(self, event: Event) -> None:
        """The function of `dadt.run` has returned or raised this."""
        self._outcome.results = {**self._outcome.results, event.frame["rank"]: event.frame.body}
        self._outbox.reply(event)(Frame("taken"), event.now)

    def exit(self, event: Event) -> None:
        self._outcome.stepped |= event.frame["step"] > 0

    def end(self, event: Event) -> None:
        """An agent's last word names the processes that it could not end."""
        self._outcome.stuck = [*self._outcome.stuck, *event.frame["stuck"]]
