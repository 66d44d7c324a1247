"""Passes questions and answers between new workers, which replace lost ones and must catch up with the running job
before they join, and the ranks that train. The new workers of an island ask together, and join together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox, Reply

LONGEST_SECONDS = 3600.0
"""Upper limit in seconds of the time that a new worker waits for an answer."""


@dataclass(slots=True)
class NewcomerQuestion:
    """A question to the ranks that train about the state of training, which all new workers of an island have asked;
    without islands, one new worker."""

    first: int
    """The first rank of the island."""
    deadline: float = float("inf")
    known: dict[int, int] = field(default_factory=dict)
    """For each new worker that has asked, how much it knows already (see the frame `approach`)."""
    last: bool = True
    """Whether all of them have asked for the last time, so that the others wait for them after this question."""
    replies: dict[int, Reply] = field(default_factory=dict)
    """Functions that answer the new workers, by rank."""
    given: set[int] = field(default_factory=set)
    """Ranks that train and have answered. If this is the last question, they now wait for the new workers to join."""
    bodies: dict[int, bytes] = field(default_factory=dict)
    """The answers, by new worker."""
    more: bool = False
    """Whether there are more values for one of them, so that all have to ask again before they replay."""

    def frame(self, number: int) -> Frame:
        """Return the frame by which the launcher sends the question to all ranks."""
        known = [self.known[rank] for rank in sorted(self.known)]
        return Frame("approach", {"number": number, "rank": self.first, "known": known, "last": self.last})

    def answer(self, now: float) -> None:
        """Answer all of the workers at once, as they have to replay up to the same step."""
        for rank, reply in self.replies.items():
            reply(Frame("given", {"more": self.more}, self.bodies[rank]), now)

    def refuse(self, why: str, now: float, error: str = "StartTimeout") -> None:
        for reply in self.replies.values():
            reply(Frame("error", {"type": error, "message": why}), now)


class Handovers:
    """Passes questions of new workers (frames `approach`) to the ranks that train, and passes their answers back: in
    islands each new worker gets that of a rank which holds the same part of the model. On the last question, all ranks
    stop training and wait for the new workers, which may then join only this generation of ranks."""

    def __init__(self, outbox: Outbox, kill: Callable[[int, float], None], patience: float, size: int) -> None:
        """kill: kills the worker of a rank that does not join. patience: seconds for which the other ranks wait for new
        workers after they have received everything that they need. size: number of ranks in an island; 1 without
        islands."""
        self._patience = patience
        self._outbox = outbox
        self._kill = kill
        self._size = size
        self._count = 0
        self._begun: dict[int, NewcomerQuestion] = {}
        """Questions that some workers of an island have not asked yet, by the island's first rank."""
        self._asked: dict[int, NewcomerQuestion] = {}
        self._awaited: dict[int, bool] = {}
        """The ranks of the new workers for which all other ranks wait now, and whether each has claimed its place."""
        self._generation = 0
        """Number of the generation of the ranks that wait."""
        self._until = 0.0

    def ask(self, event: Event, reply: Reply) -> None:
        asks = event.frame
        rank, first = asks["rank"], asks["rank"] - asks["rank"] % self._size
        self._drop(rank)
        question = self._begun.setdefault(first, NewcomerQuestion(first))
        question.known[rank], question.replies[rank] = asks["known"], reply
        question.last = question.last and asks["last"]
        question.deadline = min(question.deadline, event.now + min(asks["timeout"], LONGEST_SECONDS))
        if len(question.known) == self._size:
            self._count += 1
            self._asked[self._count] = self._begun.pop(first)
            self._outbox.send_all(question.frame(self._count))

    def give(self, event: Event, generation: int, present: Collection[int]) -> bool:
        """Record a rank's answer to new workers. generation: number of the current generation of ranks. present: the
        ranks in this generation. Returns True if this rank waits for new workers that are gone, so that all ranks must
        connect again."""
        answer, now = event.frame, event.now
        number, current = answer["number"], answer.get("generation", 0) == generation
        asked = self._asked.get(number)
        if asked is None:
            return bool(answer["last"] and not answer["text"] and current and 0 < number <= self._count)
        if answer["text"]:
            self._asked.pop(number).refuse(answer["text"], now, "NotResumed")
        elif current:
            asked.given.add(answer["rank"])
            if answer.body:
                asked.bodies[asked.first + answer["rank"] % self._size] = answer.body
                asked.more = asked.more or answer["more"]
            if asked.bodies.keys() == asked.known.keys() and (not answer["last"] or asked.given >= set(present)):
                del self._asked[number]
                asked.answer(now)
                if answer["last"]:
                    self._awaited = dict.fromkeys(sorted(asked.known), False)
                    self._generation, self._until = generation, now + self._patience
        return False

    def awaits(self, rank: int, generation: int) -> bool:
        """Return whether the other ranks, of this generation, wait for the new worker of this rank."""
        return rank in self._awaited and self._generation == generation

    def come(self, rank: int) -> list[int]:
        """Record that a new worker for which the others wait has claimed its place. Returns the ranks that join now:
        all of its island, once it is the last one; until then none."""
        self._awaited[rank] = True
        return list(self._awaited) if all(self._awaited.values()) else []

    def ended(self, rank: int) -> bool:
        """Record that a new worker's process has ended. Returns whether the other ranks were waiting for this
        worker."""
        self._drop(rank)
        waited = rank in self._awaited
        if waited:
            self._awaited = {}
        return waited

    def _drop(self, rank: int) -> None:
        """Discard the unanswered questions of this rank's worker, which is gone or asks a new question."""
        self._asked = {number: asked for number, asked in self._asked.items() if rank not in asked.replies}
        self._begun = {first: begun for first, begun in self._begun.items() if rank not in begun.replies}

    def begin_anew(self) -> None:
        """Send the unanswered questions to all ranks again. Called when all ranks connect again, since a rank that has
        joined has not received them."""
        self._awaited = {}
        for number, asked in self._asked.items():
            asked.given.clear()
            asked.bodies.clear()
            asked.more = False
            self._outbox.send_all(asked.frame(number))

    def turn(self, now: float) -> None:
        """Refuse questions that were not answered in time, and kill new workers that have not joined in time. Call
        regularly."""
        self._asked = self._in_time(self._asked, "the others have taken no step in time", now)
        self._begun = self._in_time(self._begun, "others of its island have not come so far in time", now)
        if self._awaited and now >= self._until:
            for rank in self._awaited:
                self._kill(rank, now)  # once a process ends, the waiting ranks continue
            self._until = float("inf")

    def _in_time(self, questions: dict[int, NewcomerQuestion], why: str, now: float) -> dict[int, NewcomerQuestion]:
        """Refuse those questions whose deadline has passed, and return the others."""
        for each in questions.values():
            if now >= each.deadline:
                each.refuse(why, now)
        return {key: each for key, each in questions.items() if now < each.deadline}
