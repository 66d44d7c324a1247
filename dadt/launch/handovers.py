"""New workers whose scripts are made again beside the running job, and what they ask of the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dadt.control.frame import Frame
from dadt.launch.monitor.board import together
from dadt.launch.monitor.members import Reply


@dataclass(frozen=True, slots=True)
class Asked:
    """By a new worker."""

    frame: Frame
    """As the others are told."""
    deadline: float
    reply: Reply

    @property
    def rank(self) -> int:
        return int(self.frame["rank"])

    def refuse(self, why: str) -> None:
        self.reply(Frame("error", {"type": "StartTimeout", "message": why}))


class Handovers:
    """Approaches are answered by a rank that trains. With the last one all of them wait for the new worker, which then
    may join their generation, and no other."""

    def __init__(self, send_all: Callable[[Frame], None]) -> None:
        self._send_all = send_all
        self._count = 0
        self._asked: dict[int, Asked] = {}
        self.awaited: tuple[int, int] | None = None
        """The rank for which the others wait, and their generation."""

    def ask(self, question: Frame, reply: Reply) -> None:
        self._count += 1
        told = {"number": self._count, "rank": question["rank"], "known": question["known"], "last": question["last"]}
        asked = Asked(Frame("approach", told), time.monotonic() + question["timeout"], reply)
        self._asked[self._count] = asked
        self._send_all(asked.frame)

    def give(self, answer: Frame, generation: int) -> bool:
        """A rank's answer. generation: the newest. Returns whether the others wait in vain: the new worker is gone."""
        asked, current = self._asked.pop(answer["number"], None), answer.get("generation", 0) == generation
        if asked is None:
            return bool(current)
        if asked.frame["last"] and not current:
            asked.refuse("ranks were lost meanwhile")
            return False
        asked.reply(together([answer.body]))
        if asked.frame["last"]:
            self.awaited = asked.rank, generation
        return False

    def ended(self, rank: int) -> bool:
        """A new worker has. Returns whether the others wait for it."""
        self._asked = {number: asked for number, asked in self._asked.items() if asked.rank != rank}
        awaited, self.awaited = self.awaited, None
        if awaited is not None and awaited[0] != rank:
            self.awaited = awaited
        return awaited is not None and awaited[0] == rank

    def begin_anew(self) -> None:
        """All connect anew. Those that have joined since need to know of what is not answered yet."""
        self.awaited = None
        for asked in self._asked.values():
            self._send_all(asked.frame)

    def turn(self) -> None:
        """Call it as time passes."""
        now = time.monotonic()
        for number in [number for number, asked in self._asked.items() if now >= asked.deadline]:
            self._asked.pop(number).refuse("the others have taken no step in time")
