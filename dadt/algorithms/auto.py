"""Measures in the synchronous steps, and then goes on with what is fastest."""

from __future__ import annotations

import struct
from typing import Any

from dadt.algorithms.pipe.pipe import Pipe
from dadt.train.measure import LARGE, SMALL, found, ratio

_TIMES = struct.Struct("<dd")
_LIGHTER = "int8"


class Auto(Pipe):
    """`pipe` where the exchange takes long enough to hide, compressed where it takes too long for that; else `sync`.

    By r, the exchange's time over that of computing a step, as the slowest rank has measured them: the same on all.
    """

    def warmed_up(self) -> None:
        a = self.attachment
        work = a.runtime.allgather(f"times{a.name}", _TIMES.pack(a.measure.compute, a.measure.exchange))
        a.runtime.wait(work)
        # In a synchronous step all wait for the rank that computes longest.
        compute, exchange = (max(times) for times in zip(*map(_TIMES.unpack, work.lanes), strict=True))
        choice = self._choose(ratio(compute, exchange))
        a.runtime.say(f"{found(a.step, compute, exchange)}: --algorithm auto{a.name} takes {choice}")

    def state(self) -> dict[str, Any]:
        a = self.attachment
        return {**super().state(), "lighter": a.compression != a.runtime.config.compression}

    def load_state(self, state: dict[str, Any]) -> None:
        a = self.attachment
        given = a.runtime.config.compression
        name = _LIGHTER if state["lighter"] and given == "none" else given
        if name != a.compression:
            a.compress(name)
        super().load_state(state)

    def _choose(self, r: float) -> str:
        """The choice, and its reason."""
        a = self.attachment
        if r < SMALL:
            self.step_synchronously("--algorithm auto took sync")
            return "sync, which is as fast here and loses nothing"
        if r <= LARGE:
            return "pipe, which hides the exchange behind the next step"
        less = "as the network bounds the speed; --algorithm local needs it less still"
        if a.compression != "none":
            return f"pipe, {less}"
        a.compress(_LIGHTER)
        return f"pipe with {_LIGHTER} compression, {less}"
