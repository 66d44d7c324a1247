"""Passes questions and answers between new workers, which replace lost ones and must catch up with the running job
before they join, and the ranks that train."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox, Reply
from dadt.launch.members.board import together

LONGEST_SECONDS = 3600.0
"""Upper limit in seconds of the time that a new worker waits for an answer."""


@dataclass(slots=True)
class NewcomerQuestion:
    """A question of a new worker to the ranks that train, about the state of training."""

    frame: Frame
    """The frame by which the launcher sends the question to all ranks."""
    deadline: float
    reply: Reply
    given: set[int] = field(default_factory=set)
    """Ranks that have answered this question, which is the new worker's last one, and now wait for the worker to
    join."""
    body: bytes = b""

    @property
    def rank(self) -> int:
        return int(self.frame["rank"])

    def refuse(self, why: str, now: float, error: str = "StartTimeout") -> None:
        self.reply(Frame("error", {"type": error, "message": why}), now)


class Handovers:
    """Passes questions of new workers (frames `approach`) to the ranks that train, and passes one rank's answer back.
    On a new worker's last question, all ranks stop training and wait for the worker, which may then join only this
    generation of ranks."""

    def __init__(self, outbox: Outbox, kill: Callable[[int, float], None], patience: float) -> None:
        """kill: kills the worker of a rank that does not join. patience: seconds for which the other ranks wait for a
        new worker after it has received everything that it needs."""
        self._patience = patience
        self._outbox = outbox
        self._kill = kill
        self._count = 0
        self._asked: dict[int, NewcomerQuestion] = {}
        self.awaited: tuple[int, int] | None = None
        """The rank of the new worker for which all other ranks wait now, and the number of their generation; None if
        they wait for no new worker."""
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
        ranks in this generation. Returns True if this rank waits for a new worker that is gone, so that all ranks must
        connect again."""
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
        """Discard the unanswered questions of this rank's worker, which is gone or asks a new question."""
        self._asked = {number: asked for number, asked in self._asked.items() if asked.rank != rank}

    def begin_anew(self) -> None:
        """Send the unanswered questions to all ranks again. Called when all ranks connect again, since a rank that has
        joined has not received them."""
        self.awaited = None
        for asked in self._asked.values():
            asked.given.clear()
            self._outbox.send_all(asked.frame)

    def turn(self, now: float) -> None:
        """Refuse questions that were not answered in time, and kill a new worker that has not joined in time. Call
        regularly."""
        for number in [number for number, asked in self._asked.items() if now >= asked.deadline]:
            self._asked.pop(number).refuse("the others have taken no step in time", now)
        if self.awaited is not None and now >= self._until:
            self._kill(self.awaited[0], now)  # once its process ends, the waiting ranks continue
            self._until = float("inf")
