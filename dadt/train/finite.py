"""Detects gradients that are not finite on some rank, and applies `--on-nan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from dadt.errors import DadtError
from dadt.train.exchange.exchange import Exchange
from dadt.train.exchange.step_metadata import StepMetadata
from dadt.train.measure import Measure
from dadt.train.ranks import Ranks
from dadt.train.restored import RestoredExchange

IGNORE, SKIP, STOP = "ignore", "skip", "stop"
TOLD = 5
"""Number of steps with NaN or infinite gradients that are each reported; later only the 8th, the 16th and so on are."""


class Finite:
    """Checks gradients for NaN and infinity. Each rank sends the result along with its gradients, so that all ranks act
    alike and know the rank concerned."""

    def __init__(self, choice: str, ranks: Ranks, names: Callable[[], Mapping[int, str]], measure: Measure) -> None:
        """choice: the value of `--on-nan`. names: returns the names of parameters, by id."""
        self._choice = choice
        self._ranks = ranks
        self._names = names
        self._measure = measure
        self.number = 0
        """Result of the last call of `look`."""

    @property
    def skips(self) -> bool:
        return self._choice == SKIP

    def look(self, parameters: Sequence[torch.Tensor], scale: torch.Tensor | None) -> int:
        """Return the 1-based index of the first parameter whose gradient is not finite on this rank. Returns 0 if there
        is none, with `--on-nan ignore`, or with a gradient scaler, which checks itself. Takes one pass over the
        gradients.
        """
        self.number = 0 if self._choice == IGNORE or scale is not None else _first(parameters)
        return self.number

    def judge(self, lanes: Sequence[StepMetadata], exchange: Exchange | RestoredExchange) -> bool:
        """Return whether to apply these averages, with an equal result on all ranks. Raises DadtError with `--on-nan
        stop`."""
        rank = next((rank for rank, lane in enumerate(lanes) if lane.not_finite), None)
        if rank is None:
            return True
        self._measure.not_finite += 1
        parameter = exchange.parameters[lanes[rank].not_finite - 1]
        name = self._names().get(id(parameter)) or f"a parameter of shape {tuple(parameter.shape)}"
        step = exchange.name.removesuffix(", again")
        text = f"{step}: the gradient of {name} is not finite on rank {self._ranks.members[rank]}"
        if self._choice == STOP:
            raise DadtError(f"{text} (--on-nan stop)")
        found = self._measure.not_finite
        if found <= TOLD or found & (found - 1) == 0:
            self._ranks.say(f"{text}; all ranks leave the step out" if self.skips else text, "warning")
        return not self.skips


def _first(parameters: Sequence[torch.Tensor]) -> int:
    gradients = [(i, _values(p.grad)) for i, p in enumerate(parameters, 1) if p.grad is not None]
    norms = torch._foreach_norm([g for _, g in gradients]) if gradients else ()
    devices = {norm.device for norm in norms}  # the host waits once per device, not once per norm
    if all(bool(torch.isfinite(torch.stack([n for n in norms if n.device == each])).all()) for each in devices):
        return 0
    # In half precision a norm may overflow to infinity although all values are finite, so check each gradient.
    return next((i for i, g in gradients if not bool(torch.isfinite(g).all())), 0)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return gradient if gradient.layout == torch.strided else gradient._values()
