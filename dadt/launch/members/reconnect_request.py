"""The question of a rank whose connection to other ranks has failed."""

from __future__ import annotations

from dataclasses import dataclass

from dadt.control.frame import Frame
from dadt.launch.actions import Reply


@dataclass(frozen=True, slots=True)
class ReconnectRequest:
    """A question from a rank whose connection to other ranks has failed: whether to connect again."""

    begun: float
    deadline: float
    why: str
    obstacle: str
    """What kept ranks from connecting when the rank asked; empty if nothing is known."""
    reply: Reply

    def answer(self, anew: bool, text: str, now: float) -> None:
        """Answer the rank. anew: whether all ranks connect again. text: why not, if its own error does not say so."""
        self.reply(Frame("reconnect", {"anew": anew, "text": text}), now)
