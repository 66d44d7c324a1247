"""Handles the questions of new workers that replace lost ones and must catch up with the running job before they join,
and the answers of the ranks that train."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox, Reply
from dadt.launch.members.board import together

LONGEST_SECONDS = 3600.0
"""Upper limit, in seconds, on how long a new worker may wait for an answer."""


@dataclass(slots=True)
class NewcomerQuestion:
    """A question from a new worker to the ranks that train."""

    frame: Frame
    """The question as a frame, as the launcher sends it to all ranks."""
    deadline: float
    reply: Reply
    given: set[int] = field(default_factory=set)
    """Ranks that have answered the new worker's last question, and now wait for this worker to join."""
    body: bytes = b""

    @property
    def rank(self) -> int:
        return int(self.frame["rank"])

    def refuse(self, why: str, now: float, error: str = "StartTimeout") -> None:
        self.reply(Frame("error", {"type": error, "message": why}), now)


class Handovers:
    """Passes questions of new workers (frames `approach`) to the ranks that train, and passes one rank's answer back.
    When a new worker asks its last question, all ranks stop and wait for the worker, which may then join only the
    current generation of ranks."""

    def __init__(self, outbox: Outbox, kill: Callable[[int, float], None], patience: float) -> None:
        """kill: ends a rank that does not join. patience: seconds for which the other ranks wait for a new worker that
        has received all that it needs to join."""
        self._patience = patience
        self._outbox = outbox
        self._kill = kill
        self._count = 0
        self._asked: dict[int, NewcomerQuestion] = {}
        self.awaited: tuple[int, int] | None = None
        """The rank of the new worker for which all other ranks wait now, and the number of their generation; None if
        they wait for nobody."""
        self._until = 0.0

    def ask(self, event: Event, reply: Reply) -> None:
        question = event.frame
        self._drop(question["rank"])
        self._count += 1
        told = {"number": self._count, "rank": question["rank"], "known": question["known"], "last": question["last"]}
        deadline = event.now + min(question["timeout"], LONGEST_SECONDS)
        self._asked[self._count] = asked = NewcomerQuestion(Frame("approach", told), deadline, reply)
        self._outbox.send_all(asked.frame)

    def give(self, event: Event, generation: int, present: Collection[int]) -> bool:
        """Record a rank's answer to a new worker. generation: number of the current generation of ranks. present: the
        ranks in this generation. Returns whether all ranks must connect again, because the new worker that they wait
        for is gone.
        """
        answer, now = event.frame, event.now
        number, current = answer["number"], answer.get("generation", 0) == generation
        asked = self._asked.get(number)
        if asked is None:
            return bool(answer["last"] and current and 0 < number <= self._count)
        if answer["text"]:
            self._asked.pop(number).refuse(answer["text"], now, "NotResumed")
        elif not answer["last"]:
            self._asked.pop(number).reply(together([answer.body]), now)
        elif current:
            asked.given.add(answer["rank"])
            asked.body = answer.body or asked.body
            if asked.given >= set(present):
                self._asked.pop(number).reply(together([asked.body]), now)
                self.awaited, self._until = (asked.rank, generation), now + self._patience
        return False

    def ended(self, rank: int) -> bool:
        """Record that a new worker's process has ended. Returns whether the other ranks were waiting for this
        worker."""
        self._drop(rank)
        waited = self.awaited is not None and self.awaited[0] == rank
        if waited:
            self.awaited = None
        return waited

    def _drop(self, rank: int) -> None:
        """Discard this rank's unanswered questions, as the worker that asked them is gone."""
        self._asked = {number: asked for number, asked in self._asked.items() if asked.rank != rank}

    def begin_anew(self) -> None:
        """Send the unanswered questions to all ranks again. Called when all ranks connect again, as ranks that joined
        meanwhile have not seen the questions."""
        self.awaited = None
        for asked in self._asked.values():
            asked.given.clear()
            self._outbox.send_all(asked.frame)

    def turn(self, now: float) -> None:
        """Refuse questions that took too long, and kill a new worker that does not join in time. Call regularly."""
        for number in [number for number, asked in self._asked.items() if now >= asked.deadline]:
            self._asked.pop(number).refuse("the others have taken no step in time", now)
        if self.awaited is not None and now >= self._until:
            self._kill(self.awaited[0], now)  # when it ends, the waiting ranks continue
            self._until = float("inf")
