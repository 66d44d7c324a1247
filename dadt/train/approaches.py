"""Requests of new workers, whose scripts are made again up to where the others are: all ranks heed each at the end of
the same step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Approach(NamedTuple):
    """A new worker asks how far the others are."""

    number: int
    """The request's number among all of the job, from 1."""
    rank: int
    """The new worker's rank."""
    known: int
    """Bytes of the values that the others' scripts have read from tensors which it has already."""
    last: bool
    """Whether the others wait for it at that step, and it joins them."""


class Approaches:
    """`hear` and `forget` are called by the thread that listens to the agent, all else by the training thread."""

    def __init__(self) -> None:
        self.heard = 0
        """The number of the newest request that this rank has received; 0: none."""
        self._open: dict[int, Approach] = {}
        self._agreed = 0

    def forget(self) -> None:
        """A new generation of ranks begins: the agent sends again what is still open."""
        self._open.clear()
        self.heard = 0

    def hear(self, approach: Approach) -> None:
        self._open[approach.number] = approach
        self.heard = max(self.heard, approach.number)

    def agree(self, heard: Iterable[int]) -> None:
        """heard: the newest request that each rank has received, as all ranks know from one exchange."""
        self._agreed = max(self._agreed, min(heard))

    def begin_anew(self) -> None:
        """Ranks have connected again: one may have had an exchange that another has not, or have joined."""
        self._agreed = 0

    def due(self) -> list[Approach]:
        """After a complete step: the requests to heed now, as all ranks know them. Each is returned once."""
        numbers = sorted(number for number in list(self._open) if number <= self._agreed)
        return [approach for number in numbers if (approach := self._open.pop(number, None)) is not None]
