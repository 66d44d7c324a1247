"""Exchanges that may still be under way, even if the code that launched them no longer refers to them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from dadt._core import Work
from dadt.comm.executors.device import Averaging


class InFlight(Protocol):
    """Interface of an operation that may still be under way and needs its memory until it is done."""

    @property
    def works(self) -> Sequence[Work | Averaging]: ...

    @property
    def done(self) -> bool: ...

    def tensors_of(self, work: Work | Averaging) -> Sequence[torch.Tensor]:
        """Return the parameters whose gradients this work averages, or an empty list if the work does not belong to
        this exchange."""

    def renew(self) -> None:
        """Allocate other memory after a failure, as a library may still write to the failed operation's memory."""


class Flights:
    """One rank's exchanges that may be under way, in the order of their launch."""

    def __init__(self) -> None:
        self.every: list[InFlight] = []
        self._launched_at: weakref.WeakKeyDictionary[InFlight, int] = weakref.WeakKeyDictionary()
        """Number of steps that this rank had taken when it launched each exchange."""

    def keep(self, exchange: InFlight, step: int) -> None:
        """Keep the exchange, and so its memory, alive until its operations are done. step: number of steps that this
        rank has taken."""
        self.every = [e for e in self.every if not (e.done or e is exchange)] + [exchange]
        self._launched_at[exchange] = step

    def renew(self) -> None:
        """Call `renew` of each exchange, which allocates other memory, because all exchanges have failed."""
        for exchange in self.every:
            exchange.renew()

    def steps_before(self, work: Any) -> int | None:
        """Return how many steps this rank had taken when it launched the work, or None if the work belongs to no
        exchange."""
        for exchange in self.every:
            if any(mine is work for mine in exchange.works):
                return self._launched_at[exchange]
        return None

    def parameters_of(self, work: Work | Averaging, names: Mapping[int, str]) -> str:
        """Return the known names of the parameters that an exchange's work averages, as in " (fc.weight and 3
        more)"."""
        for exchange in self.every:
            known = [names[id(t)] for t in exchange.tensors_of(work) if id(t) in names]
            if known:
                return f" ({known[0]}" + (f" and {len(known) - 1} more)" if known[1:] else ")")
        return ""
