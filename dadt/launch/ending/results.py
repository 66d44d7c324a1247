"""Collects the workers' reports about their training, for the outcome of the job."""

from __future__ import annotations

from collections.abc import Sequence

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox
from dadt.launch.ending.outcome import Outcome
from dadt.launch.members.member import Member


class Results:
    """Fills in the job's outcome as reports from the workers arrive."""

    def __init__(self, outcome: Outcome, members: Sequence[Member], outbox: Outbox) -> None:
        self._outcome = outcome
        self._members = members
        self._outbox = outbox

    def hello(self, event: Event) -> None:
        """Record that a worker process has imported torch with DADT hooked in."""
        self._outcome.hooked = True

    def done(self, event: Event) -> None:
        """Record the summary that a rank sends at the end of its training."""
        rank = event.frame["rank"]
        if not self._members[rank].lost:
            self._outcome.summaries = {**self._outcome.summaries, rank: event.frame["summary"]}
            self._members[rank].finished = True

    def result(self, event: Event) -> None:
        """Record what the function passed to `dadt.run` returned or raised on a rank."""
        self._outcome.results = {**self._outcome.results, event.frame["rank"]: event.frame.body}
        self._outbox.reply(event)(Frame("taken"), event.now)

    def exit(self, event: Event) -> None:
        self._outcome.stepped |= event.frame["step"] > 0

    def end(self, event: Event) -> None:
        """Record the processes that an agent could not end, as its final report lists them."""
        self._outcome.stuck = [*self._outcome.stuck, *event.frame["stuck"]]
