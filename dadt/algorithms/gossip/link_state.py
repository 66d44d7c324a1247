"""State that two neighbours share from earlier exchanges, and so need not send again."""

from __future__ import annotations

import abc
import zlib
from typing import TYPE_CHECKING

import torch

from dadt.algorithms.gossip.snapshot import grains

if TYPE_CHECKING:
    from dadt.algorithms.gossip.snapshot import WeightSnapshot


class LinkState(abc.ABC):
    """One end of the state. Each end computes it from the same messages, so both have the same bits; where one has lost
    it, both begin again. Used by one thread.

    An exchange is a message each way, of one size. Then both ends move by the same numbers with opposite signs.
    """

    def __init__(self, name: str, snapshot: WeightSnapshot) -> None:
        """name: as given to --compression."""
        self._name = name.encode()
        self.crc = zlib.crc32(self._name, snapshot.crc)
        """Equal on ranks that can exchange."""
        self.number = 0
        """Exchanges that are complete so far."""

    def fits(self, snapshot: WeightSnapshot) -> bool:
        """Whether these are weights of the kind that it began with."""
        return self.crc == zlib.crc32(self._name, snapshot.crc)

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Bytes of the next message."""

    @abc.abstractmethod
    def say(self, snapshot: WeightSnapshot, message: torch.Tensor) -> int:
        """Fill this end's message. Returns the step at which the snapshot that it is made of was taken."""

    def settle(self, snapshot: WeightSnapshot, mine: torch.Tensor, theirs: torch.Tensor, step: int) -> None:
        """Both messages are known: go half the way to the other end. mine: what `say` gave, at this step. Overwrites
        theirs."""
        self._settle(snapshot, mine, theirs)
        self.number += 1
        snapshot.moved(step)

    @abc.abstractmethod
    def _settle(self, snapshot: WeightSnapshot, mine: torch.Tensor, theirs: torch.Tensor) -> None: ...


class PlainLinkState(LinkState):
    """Sends the weights as they are; keeps nothing from earlier exchanges."""

    def __init__(self, name: str, snapshot: WeightSnapshot) -> None:
        super().__init__(name, snapshot)
        self._bytes = snapshot.bytes

    @property
    def size(self) -> int:
        return self._bytes

    def say(self, snapshot: WeightSnapshot, message: torch.Tensor) -> int:
        step = snapshot.step
        for part in snapshot.parts:
            snapshot.read(part, part.of(message))
        return step

    def _settle(self, snapshot: WeightSnapshot, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        for part in snapshot.parts:
            snapshot.add(part, half_way(part.of(mine), part.of(theirs)))


def half_way(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """(theirs - mine) / 2, in the place of theirs: the other end's own has the same bits, but for the sign.

    0 where that is no number: what one rank has lost would else be lost by all, and come back to who restores it.
    """
    torch._foreach_sub_(grains(theirs), grains(mine))
    torch._foreach_mul_(grains(theirs), 0.5)
    for grain in grains(torch.view_as_real(theirs).view(-1) if theirs.is_complex() else theirs):
        torch.nan_to_num_(grain, nan=0.0, posinf=0.0, neginf=0.0)
    return theirs
