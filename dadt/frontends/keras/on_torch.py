"""Keras on torch, in scripts that do not use DADT's API: gradients are averaged where Keras's optimizers apply them."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dadt.config.check import UNEQUAL
from dadt.errors import ConfigError
from dadt.frontends.keras.fit import KerasTraining, momentum_of, nothing
from dadt.inject import worker
from dadt.inject.foreign import Carrier
from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime


class KerasCarrier(Carrier):
    """A torch optimizer that stands for an optimizer of Keras (a carrier), and whose state is the Keras optimizer's
    variables."""

    def __init__(self, owner: Any, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(weakref.proxy(owner), list(parameters), momentum_of(owner))

    def kept(self) -> dict[str, torch.Tensor]:
        return {f"{number} {v.path}": v.value.data for number, v in enumerate(self.owner.variables)}


class TorchTraining(KerasTraining):
    """Hooks into Keras on torch. Each Keras optimizer has a carrier: a torch optimizer over the same parameters, whose
    step averages the gradients."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._carriers: weakref.WeakKeyDictionary[Any, KerasCarrier] = weakref.WeakKeyDictionary()

    def install(self, keras: Any) -> None:
        super().install(keras)
        self._divide_epochs(importlib.import_module("keras.src.trainers.epoch_iterator").EpochIterator)

    def average_at(self, optimizers: Any) -> None:
        @replaces("apply", optimizers)
        def apply(optimizer: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
            original = apply.__wrapped__
            if self.left_alone(optimizer):
                return original(optimizer, grads, trainable_variables)
            variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
            parameters = [v.value for v in variables]
            for parameter, gradient in zip(parameters, grads, strict=True):
                if gradient is not parameter.grad:
                    parameter.grad = gradient
            carrier = self._carrier_of(optimizer, variables)

            def run() -> None:
                """Apply the averaged gradients. If averages come one step late, the first step has no averages and
                applies nothing."""
                gradients = [p.grad for p in parameters]
                if (factor := self.factor_of(optimizer) or 1) != 1:
                    gradients = [None if g is None else g * factor for g in gradients]
                if any(each is not None for each in gradients):
                    with self.within(optimizer):
                        original(optimizer, gradients, variables)

            carrier.run = run
            try:
                carrier.step()
                return None
            finally:
                carrier.run = nothing  # a reference to the function `run` would keep the Keras optimizer alive

    def _carrier_of(self, optimizer: Any, variables: Sequence[Any]) -> KerasCarrier:
        if optimizer not in self._carriers:
            if not optimizer.built:
                optimizer.build(variables)
            carrier = self._carriers[optimizer] = KerasCarrier(optimizer, [v.value for v in variables])
            if self.factor_of(optimizer) is not None:
                worker.wrap(carrier)
        return self._carriers[optimizer]

    def _divide_epochs(self, kind: Any) -> None:
        """Patch the epoch iterator's `reset` so that an epoch has one rank's number of batches. Before the first batch
        is loaded, the patch gives the optimizer its carrier, because DADT divides data only once an optimizer is
        known."""

        @replaces("reset", kind)
        def reset(iterator: Any) -> None:
            reset.__wrapped__(iterator)
            if not self.fitting or not torch.is_grad_enabled():
                return
            model = self.fitting[-1]
            if model.optimizer is not None and model.trainable_variables:
                self._carrier_of(model.optimizer, model.trainable_variables)
            if (batch := self.runtime.ranks.config.batch) in UNEQUAL:
                raise ConfigError(f"--batch {batch}: Keras divides epochs, and not each batch; leave it out")
            if batch == "global":
                return
            self.divide_steps(iterator)
            # The length of a DataLoader that the script created is one rank's number of batches already.
            counted = type(iterator.data_adapter).__name__ == "TorchDataLoaderAdapter"
            if iterator._num_batches and not counted:
                iterator._num_batches = -(-iterator._num_batches // self.runtime.ranks.world.world_size)
