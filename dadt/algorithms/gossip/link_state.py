"""State that two neighbours share from earlier exchanges, so that they need not send all of their weights again."""

from __future__ import annotations

import abc
import zlib

import torch

from dadt.algorithms.gossip.snapshot import WeightSnapshot, grains


class LinkState(abc.ABC):
    """One rank's copy of the state shared with a neighbour. Both compute it from the same messages, so it is bitwise
    equal; if one rank loses its copy, both begin again. Used by one thread.

    In an exchange, each rank sends one message of equal size. Then both move their weights by the same numbers with
    opposite signs.
    """

    def __init__(self, name: str, snapshot: WeightSnapshot) -> None:
        """name: the value of --compression. snapshot: the weights of the first exchange."""
        self._name = name.encode()
        self.crc = zlib.crc32(self._name, snapshot.crc)
        """Checksum of compression and layout of the weights: ranks with equal checksums can exchange."""
        self.number = 0
        """Number of exchanges with the neighbour that are complete so far."""

    def fits(self, snapshot: WeightSnapshot) -> bool:
        """Whether the snapshot's weights have the layout that this state was created for."""
        return self.crc == zlib.crc32(self._name, snapshot.crc)

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of bytes of this rank's next message to the neighbour."""

    @abc.abstractmethod
    def say(self, snapshot: WeightSnapshot, message: torch.Tensor) -> int:
        """Write this rank's message into `message`. Returns the number of the step at which the snapshot was copied."""

    def settle(self, snapshot: WeightSnapshot, mine: torch.Tensor, theirs: torch.Tensor, step: int) -> None:
        """Move this rank's weights halfway to the neighbour's weights, after both messages have arrived. mine: this
        rank's message, written by `say` at step `step`. theirs: the neighbour's message; it is overwritten."""
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
    """Overwrite `theirs` with (theirs - mine) / 2 and return it. The neighbour computes bitwise the same numbers with
    opposite sign.

    NaN and infinity become 0: otherwise one rank's infinite weights would spread to all ranks, and come back even to a
    rank whose script restores its weights.
    """
    torch._foreach_sub_(grains(theirs), grains(mine))
    torch._foreach_mul_(grains(theirs), 0.5)
    for grain in grains(torch.view_as_real(theirs).view(-1) if theirs.is_complex() else theirs):
        torch.nan_to_num_(grain, nan=0.0, posinf=0.0, neginf=0.0)
    return theirs
