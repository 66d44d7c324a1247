"""Restores the state that differs between ranks after a replay, so that training continues with identical bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dadt.comm.shards import local
from dadt.inject.replay.roster import Roster
from dadt.train.optimizer_state import sharded
from dadt.train.runtime import Runtime


class Own:
    """Restores the state that one rank does not have in common with others. When optimizers are attached, all ranks
    receive the first rank's values; afterwards this object puts the rank's own values back."""

    def __init__(self, runtime: Runtime, roster: Roster) -> None:
        self._runtime, self._roster = runtime, roster
        self._before: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._states: list[tuple[torch.optim.Optimizer, dict[Any, Any]]] = []
        self._apart = False
        """Whether each rank has weights of its own, instead of weights that are equal on all ranks."""
        self._names: set[str] = set()
        """Names of the tensors whose values are this rank's own."""

    def put_in_place(self, own: Mapping[str, Any]) -> None:
        r, tensors = self._runtime, dict(self._roster.tensors())
        self._apart = "weights" in own
        self._names = {*own.get("weights", {}), *own["buffers"]}
        with torch.no_grad():
            for name, value in {**own.get("weights", {}), **own["buffers"]}.items():
                if name in tensors:
                    local(tensors[name]).data.copy_(value)
        r.buffers.restore(
            (module, names, on(module, official), on(module, mine))
            for number, names, official, mine in own["averaged"]
            if (module := self._roster.module(number)) is not None
        )
        states = own.get("states", {})
        for optimizer in r.optimizers:
            if (training := own["training"].get(r.optimizers.number(optimizer))) is not None:
                r.checkpoints.keep_own(optimizer, training)
            if (state := states.get(r.optimizers.number(optimizer))) is not None:
                with r.checkpoints.aside():
                    optimizer.load_state_dict(sharded(optimizer, state))
        r.events.on_claim.append(self._keep)
        r.checkpoints.on_resumed.append(self._put_back)

    def _keep(self) -> None:
        """Called just before optimizers are attached: store this rank's own values, which are then overwritten by the
        first rank's."""
        if self._before is None:
            with torch.no_grad():
                self._before = [(tensor, tensor.data.clone()) for tensor in self._tensors()]
            if self._apart:
                self._states = [(o, dict(o.state)) for o in self._runtime.optimizers]

    def _put_back(self) -> None:
        with torch.no_grad():
            for tensor, value in self._before or ():
                tensor.data.copy_(value)
        for optimizer, state in self._states:
            optimizer.state.clear()
            optimizer.state.update(state)
        self._before, self._states = [], []

    def _tensors(self) -> Iterator[torch.Tensor]:
        for name, tensor in self._roster.tensors() if self._apart else self._roster.buffers():
            if name in self._names:
                yield tensor


def on(module: torch.nn.Module, values: Mapping[str, torch.Tensor] | None) -> Any:
    """Return the values of buffers, by name, each moved to the device of the module's buffer of this name. Returns None
    if `values` is None."""
    if values is None:
        return None
    return {name: value.to(b.device) for name, value in values.items() if (b := module._buffers.get(name)) is not None}
