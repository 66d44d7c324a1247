"""Detects gradients that are not finite on some rank, and applies `--on-nan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dadt.comm import shards
from dadt.errors import DadtError
from dadt.train.exchange.exchange import Exchange
from dadt.train.exchange.step_metadata import StepMetadata
from dadt.train.measure import Measure
from dadt.train.ranks import Ranks
from dadt.train.restored import RestoredExchange

IGNORE, SKIP, STOP = "ignore", "skip", "stop"
TOLD = 5
"""Number of first steps with NaN or infinite gradients that are each reported. Of later such steps, only the 8th, the
16th and so on are reported."""


class Finite:
    """Checks gradients for NaN and infinity. Each rank sends the result along with its gradients, so that all ranks act
    alike and know which rank has such gradients."""

    def __init__(self, choice: str, ranks: Ranks, names: Callable[[], Mapping[int, str]], measure: Measure) -> None:
        """choice: the value of `--on-nan`. names: function that returns the names of parameters, by id."""
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
        is none, with `--on-nan ignore`, or with a gradient scaler, which checks itself. Reads the gradients once. Ranks
        that each store a part of one model return the largest index of any of them, so that all skip the step.
        """
        looks = self._choice != IGNORE and scale is None and len(parameters) > 0
        self.number = _first(parameters) if looks else 0
        if looks and self._ranks.world.parts > 1:
            self.number = _most_of_parts(self.number, parameters[0], in_rows=self._ranks.world.shard_size > 0)
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
        first, world = self._ranks.members[rank], self._ranks.world
        where = f"in island {first // world.parts}" if world.island_size else f"on rank {first}"
        if world.shard_size:
            first -= first % world.parts
            where = f"on one of ranks {first} to {first + world.parts - 1}"
        text = f"{step}: the gradient of {name} is not finite {where}"
        if self._choice == STOP:
            raise DadtError(f"{text} (--on-nan stop)")
        found = self._measure.not_finite
        if found <= TOLD or found & (found - 1) == 0:
            self._ranks.say(f"{text}; all ranks leave the step out" if self.skips else text, "warning")
        return not self.skips


def _first(parameters: Sequence[torch.Tensor]) -> int:
    found = enumerate(shards.gradients(parameters), 1)
    gradients = [(i, _values(g)) for i, g in found if g is not None]
    norms = torch._foreach_norm([g for _, g in gradients]) if gradients else ()
    devices = {norm.device for norm in norms}  # the host waits once per device, not once per norm
    if all(bool(torch.isfinite(torch.stack([n for n in norms if n.device == each])).all()) for each in devices):
        return 0
    # In half precision a norm may overflow to infinity although all values are finite, so check each gradient.
    return next((i for i, g in gradients if not bool(torch.isfinite(g).all())), 0)


def _most_of_parts(number: int, parameter: Any, *, in_rows: bool) -> int:
    """Return the maximum of `number` over all ranks that store parts of the same model, computed in the script's own
    process groups. in_rows: whether these ranks are a row of the parameter's device mesh, rather than all ranks of
    torch.distributed."""
    if not torch.distributed.is_initialized():
        return number
    most = torch.tensor(number, dtype=torch.int64, device=parameter.device)
    for group in parameter.device_mesh.get_all_groups()[1:] if in_rows else [None]:
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=group)
    return int(most)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return gradient if gradient.layout == torch.strided else gradient._values()
