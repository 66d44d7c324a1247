"""The questions of ranks to which a simulated launcher owes an answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from dadt.control.frame import Frame
from dadt.launch.actions import Event
from dadt.launch.members.node import Node

LATE_SECONDS = 1.0
"""How late the launcher may be with what is due."""


class Question(NamedTuple):
    """What a rank has asked, and waits for."""

    rank: int
    generation: int
    until: float
    """When the answer has to come at last."""
    text: str


class OpenQuestions:
    """Questions of ranks that wait, by the line on which the answer comes."""

    def __init__(self) -> None:
        self._open: dict[tuple[Node, int], Question] = {}

    def __iter__(self) -> Iterator[Question]:
        return iter(self._open.values())

    def note(self, event: Event) -> None:
        """A frame has come that may be a question, or says that nobody waits for the answer any more."""
        frame = event.frame
        if frame.kind in ("exchange", "get", "reconnect", "approach"):
            until = event.now + frame["timeout"] + LATE_SECONDS
            generation = sys.maxsize if frame.kind == "approach" else frame.get("generation", 0)
            self._open[event.node, frame["line"]] = Question(frame["rank"], generation, until, described(frame))
        elif frame.kind == "exit":
            self.ended(frame["rank"])
        elif frame.kind == "lost":
            self._open = {asked: each for asked, each in self._open.items() if asked[0] is not event.node}

    def ended(self, rank: int) -> None:
        """This rank's process has ended, or is told to at once: it waits for no answer."""
        self._open = {asked: each for asked, each in self._open.items() if each.rank != rank}

    def answered(self, node: Node, line: int) -> None:
        """An answer was sent on this line of a host."""
        self._open.pop((node, line), None)


def described(frame: Frame) -> str:
    """A frame in a line, for those who read of it."""
    return f"{frame.kind} {', '.join(f'{name} {value}' for name, value in frame.header.items())}"[:300]
