"""Keras on torch, in scripts that do not use DADT's API: gradients are averaged where Keras's optimizers apply them."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dadt.config.check import UNEQUAL
from dadt.errors import ConfigError
from dadt.frontends.keras.fit import KerasTraining, momentum_of
from dadt.inject import worker
from dadt.inject.foreign import Carrier, nothing
from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime

_ADAMS = ("Adam", "AdamW", "Nadam")
"""Optimizers of Keras that compute momentum and second moment as torch's Adam does. Their weight decay changes weights
alone, and so do averages of weights (EMA)."""
_CLIPS = "clips gradients within its step"
_WITHIN_STEP = {
    "amsgrad": "has amsgrad",
    "clipnorm": _CLIPS,
    "clipvalue": _CLIPS,
    "global_clipnorm": _CLIPS,
    "gradient_accumulation_steps": "accumulates gradients within its step",
    "loss_scale_factor": "divides gradients by a loss scale within its step",
}
"""What other options of theirs do, by their names: momentum or the step is then not made of the averages alone."""


class KerasCarrier(Carrier):
    """A torch optimizer that stands for an optimizer of Keras (a carrier), and whose state is the Keras optimizer's
    variables."""

    def __init__(self, owner: Any, parameters: Sequence[torch.Tensor], factor: int = 1) -> None:
        """factor: number by which averaged gradients are multiplied before the Keras optimizer gets them."""
        super().__init__(weakref.proxy(owner), list(parameters), momentum_of(owner))
        self.title = f"Keras's {self.title}"
        self.unsuited = _unsuited(owner, self.title, factor)
        self._variables = {v.value: v for v in owner._trainable_variables}

    def kept(self) -> dict[str, torch.Tensor]:
        return {f"{number} {v.path}": v.value.data for number, v in enumerate(self.owner.variables)}

    @property
    def betas(self) -> tuple[float, float]:
        return float(self.owner.beta_1), float(self.owner.beta_2)

    @property
    def rate(self) -> float:
        return float(self.owner.learning_rate)

    def moments(self, parameter: torch.Tensor) -> dict[str, Any]:
        if parameter not in self._variables:
            return {}
        owner, index = self.owner, self.owner._get_variable_index(self._variables[parameter])
        every = {"exp_avg": owner._momentums[index], "exp_avg_sq": owner._velocities[index], "step": owner.iterations}
        return {name: variable.value.data for name, variable in every.items()}


def _unsuited(optimizer: Any, title: str, factor: int) -> str:
    """Return the reason why an optimizer of Keras does not make its momentum of gradients as Adam does; empty if it
    does."""
    kind = type(optimizer)
    if not kind.__module__.startswith("keras.") or kind.__name__ not in _ADAMS:
        return f"the step of {title} is not known"
    if any(momentum is None for momentum in optimizer._momentums):
        return f"{title} overwrites weights by gradients"
    found = [what for name, what in _WITHIN_STEP.items() if getattr(optimizer, name, None)]
    return f"{title} {found[0]}" if found else f"{title} gets sums of gradients" if factor != 1 else ""


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
            carrier = self._carriers[optimizer] = KerasCarrier(
                optimizer, [v.value for v in variables], self.factor_of(optimizer) or 1
            )
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
