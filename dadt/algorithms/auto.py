"""Measures in the synchronous steps, and then goes on with what is fastest."""

from __future__ import annotations

import struct

from dadt.algorithms.pipe import Pipe
from dadt.measure import LARGE, SMALL, found, ratio

_TIMES = struct.Struct("<dd")


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
        r = ratio(compute, exchange)
        if r < SMALL:
            self.step_synchronously()
            chosen = "sync, which is as fast here and loses nothing"
        elif r <= LARGE:
            chosen = "pipe, which hides the exchange behind the next step"
        elif a.compression == "none":
            a.compress("int8")
            chosen = (
                "pipe with int8 compression, as the network bounds the speed; --algorithm local needs it less still"
            )
        else:
            chosen = "pipe, as the network bounds the speed; --algorithm local needs it less still"
        a.runtime.say(f"{found(a.step, compute, exchange)}: --algorithm auto{a.name} takes {chosen}")
