"""The request of a rank whose connection to another rank has failed."""

from __future__ import annotations

from dataclasses import dataclass

from dadt.control.frame import Frame
from dadt.launch.actions import Reply


@dataclass(frozen=True, slots=True)
class ReconnectRequest:
    """The request of a rank whose connection to another rank has failed. The launcher answers whether all ranks connect
    again."""

    begun: float
    deadline: float
    why: str
    obstacle: str
    """Text that says why ranks could not connect when the request was made; empty if nothing is known."""
    reply: Reply

    def answer(self, anew: bool, text: str, now: float) -> None:
        """Answer the rank. anew: whether all ranks connect again. text: why not; empty if the rank's own error says
        it."""
        self.reply(Frame("reconnect", {"anew": anew, "text": text}), now)
