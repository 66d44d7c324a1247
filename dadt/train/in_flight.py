"""Exchanges that may not be done yet, whatever has become of who launched them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from dadt._core import Work
    from dadt.comm.executors.device import Averaging


class InFlight(Protocol):
    """Work that may still be under way, and that holds memory until it is done."""

    @property
    def works(self) -> Sequence[Work | Averaging]: ...

    @property
    def done(self) -> bool: ...

    def tensors_of(self, work: Work | Averaging) -> Sequence[torch.Tensor]:
        """The parameters whose gradients it moves; none if it is not one of these works."""

    def renew(self) -> None:
        """It has failed, and a library may go on writing to its memory: take other memory."""


class Flights:
    """One rank's exchanges that may be under way, in the order of their launch."""

    def __init__(self) -> None:
        self.every: list[InFlight] = []
        self._launched_at: weakref.WeakKeyDictionary[InFlight, int] = weakref.WeakKeyDictionary()
        """How many steps this rank had taken when it launched each."""

    def keep(self, exchange: InFlight, step: int) -> None:
        """Hold its memory until its works are done. step: how many this rank has taken."""
        self.every = [e for e in self.every if not (e.done or e is exchange)] + [exchange]
        self._launched_at[exchange] = step

    def renew(self) -> None:
        """All have failed: call InFlight.renew of each."""
        for exchange in self.every:
            exchange.renew()

    def steps_before(self, work: Any) -> int | None:
        """How many steps this rank had taken when it launched the work; None if it is of no exchange."""
        for exchange in self.every:
            if any(mine is work for mine in exchange.works):
                return self._launched_at[exchange]
        return None

    def parameters_of(self, work: Work | Averaging, names: Mapping[int, str]) -> str:
        """The names of what an exchange's work moves, as far as known: " (fc.weight and 3 more)"."""
        for exchange in self.every:
            known = [names[id(t)] for t in exchange.tensors_of(work) if id(t) in names]
            if known:
                return f" ({known[0]}" + (f" and {len(known) - 1} more)" if known[1:] else ")")
        return ""
