"""New workers whose scripts are made again beside the running job, and what they ask of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox, Reply
from dadt.launch.members.board import together

LONGEST_SECONDS = 3600.0
"""Most seconds that a new worker waits for an answer."""


@dataclass(slots=True)
class NewcomerQuestion:
    """A question of a new worker to the other ranks."""

    frame: Frame
    """The frame with the question, as it is sent to the other ranks."""
    deadline: float
    reply: Reply
    given: set[int] = field(default_factory=set)
    """Ranks that have answered, and wait for the new worker."""
    body: bytes = b""

    @property
    def rank(self) -> int:
        return int(self.frame["rank"])

    def refuse(self, why: str, now: float, error: str = "StartTimeout") -> None:
        self.reply(Frame("error", {"type": error, "message": why}), now)


class Handovers:
    """Approaches are answered by a rank that trains. With the last one all of them wait for the new worker, which then
    may join their generation, and no other."""

    def __init__(self, outbox: Outbox, kill: Callable[[int, float], None], patience: float) -> None:
        """kill: ends a rank that does not join. patience: seconds for which the others wait for one that has all that
        it needs to join."""
        self._patience = patience
        self._outbox = outbox
        self._kill = kill
        self._count = 0
        self._asked: dict[int, NewcomerQuestion] = {}
        self.awaited: tuple[int, int] | None = None
        """The rank for which the others wait, and their generation."""
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
        """Record a rank's answer to a new worker. generation: the newest, of the ranks `present`. Returns whether all
        are to connect again, as the new worker for which they wait is gone."""
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
        """Note that a new worker has ended. Returns whether the others wait for it."""
        self._drop(rank)
        waited = self.awaited is not None and self.awaited[0] == rank
        if waited:
            self.awaited = None
        return waited

    def _drop(self, rank: int) -> None:
        """Forget this rank's questions, as nobody waits for the answers any more."""
        self._asked = {number: asked for number, asked in self._asked.items() if asked.rank != rank}

    def begin_anew(self) -> None:
        """Send the unanswered questions again: all ranks connect again, and those that have joined since need to know
        of them."""
        self.awaited = None
        for asked in self._asked.values():
            asked.given.clear()
            self._outbox.send_all(asked.frame)

    def turn(self, now: float) -> None:
        """Call it as time passes."""
        for number in [number for number, asked in self._asked.items() if now >= asked.deadline]:
            self._asked.pop(number).refuse("the others have taken no step in time", now)
        if self.awaited is not None and now >= self._until:
            self._kill(self.awaited[0], now)  # its end has the others go on
            self._until = float("inf")
