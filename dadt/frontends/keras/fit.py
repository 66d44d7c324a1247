"""Keras on any backend, in scripts that do not use DADT's API: `fit` divides its data among ranks, callbacks receive
the ranks' mean logs of each epoch, and each rank evaluates all data."""

from __future__ import annotations

import importlib
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dadt.frontends.tensorflow.memory import to_numpy, to_torch
from dadt.inject.patch import replaces
from dadt.train.common_values import take_means
from dadt.train.runtime import Runtime


class KerasTraining(ABC):
    """Hooks into Keras in one process. In a script that calls `dadt.init`, only optimizers that the script has wrapped
    are affected."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._factors: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Factor by which an optimizer's averaged gradients are multiplied, for each optimizer that the script has
        wrapped."""
        self._stepping: list[Any] = []
        """Optimizers whose `apply` is running with averaged gradients, the innermost last."""
        self.fitting: list[Any] = []
        """Models whose `fit` is running, the innermost last."""
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()
        """Learning rate schedules about which the user has been warned."""

    def install(self, keras: Any) -> None:
        """Patch Keras's methods for training and evaluation."""
        # Both classes have an `apply` of their own. LossScaleOptimizer skips steps whose gradients are not finite. It
        # examines averaged gradients, so all ranks skip the same steps.
        for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
            self.average_at(kind)
        self.patch_fit(keras.Model)
        self._pass_whole("evaluate", keras.Model)
        self._pass_whole("predict", keras.Model)
        self._tell_alike(keras.callbacks.CallbackList)

    @abstractmethod
    def average_at(self, optimizers: Any) -> None:
        """Patch `apply` of this optimizer class, which subclasses inherit, so that gradients are averaged over all
        ranks before they are applied."""

    def enlist(self, optimizer: Any, factor: int) -> None:
        """Train with this optimizer on all ranks, in a script that calls `dadt.init`. factor: number by which the
        averaged gradients are multiplied."""
        self._factors.setdefault(optimizer, factor)

    def left_alone(self, optimizer: Any) -> bool:
        """Whether the optimizer applies gradients without averaging, as it does within another optimizer's step, and in
        a script that calls `dadt.init` and has not wrapped this optimizer."""
        return bool(self._stepping) or (self.runtime.script.explicit and self.factor_of(optimizer) is None)

    def factor_of(self, optimizer: Any) -> int | None:
        """Return the factor by which this optimizer's averaged gradients are multiplied; None if the script has wrapped
        neither this optimizer nor its inner optimizer."""
        return self._factors.get(optimizer, self._factors.get(inner_of(optimizer)))

    @contextmanager
    def within(self, optimizer: Any) -> Iterator[None]:
        """Context in which the optimizer applies averaged gradients."""
        self._stepping.append(optimizer)
        try:
            yield
        finally:
            self._stepping.pop()

    def divide_steps(self, iterator: Any) -> None:
        """Divide `steps_per_epoch`, if the script has passed it to `fit`, by the number of ranks, once. Warn, once for
        each learning rate schedule, that the schedule counts one worker's steps."""
        ranks = self.runtime.ranks.world.world_size
        if iterator.steps_per_epoch and not getattr(iterator, "is_divided", False):
            iterator.steps_per_epoch = max(1, iterator.steps_per_epoch // ranks)
            iterator.is_divided = True
        schedule = getattr(inner_of(self.fitting[-1].optimizer), "_learning_rate", None)
        if isinstance(schedule, importlib.import_module("keras").optimizers.schedules.LearningRateSchedule):
            if schedule not in self._warned and not self.runtime.ranks.world.rank:
                self.runtime.ranks.say(
                    f"{type(schedule).__name__} counts the steps of a worker, of which an epoch has one for every"
                    f" {ranks} batches: divide its numbers of steps by {ranks}",
                    "warning",
                )
            self._warned.add(schedule)

    def patch_fit(self, kind: Any) -> None:
        """Patch `Model.fit`, so that it trains on all ranks."""

        @replaces("fit", kind)
        def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
            original = fit.__wrapped__
            if self.runtime.script.explicit:
                return original(model, *args, **kwargs)
            self.fitting.append(model)
            self.runtime.script.fitting = True
            try:
                history = self._said_once(original, model, *args, **kwargs)
                self._average_statistics(model)
                return history
            finally:
                self.fitting.pop()
                self.runtime.script.fitting = bool(self.fitting)

    def _pass_whole(self, name: str, kind: Any) -> None:
        """Patch `evaluate` or `predict` so that each rank processes all data. For this, the pass begins with gradients
        disabled, in which case DADT does not divide its data."""

        @replaces(name, kind)
        def run(model: Any, *args: Any, **kwargs: Any) -> Any:
            original = run.__wrapped__
            if self.runtime.script.explicit:
                return original(model, *args, **kwargs)
            if model in self.fitting:
                self._average_statistics(model)
            with torch.no_grad():
                return self._said_once(original, model, *args, **kwargs)

    def _said_once(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the Keras method with its progress output turned off on all ranks but rank 0, since every rank would
        print the same output."""
        if not self.runtime.ranks.world.rank:
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments["verbose"] = 0
        return original(*given.args, **given.kwargs)

    def _tell_alike(self, kind: Any) -> None:
        """Patch `on_epoch_end` so that callbacks receive equal logs on all ranks. Callbacks that stop training or
        change the learning rate then do so on all ranks."""
        runtime = self.runtime

        @replaces("on_epoch_end", kind)
        def on_epoch_end(callbacks: Any, epoch: int, logs: Any = None) -> None:
            if self.fitting and logs:
                # Make this process the one that acts as its rank. Otherwise only a step of an optimizer would do so.
                runtime.claim()
                logs = averaged(
                    logs,
                    lambda mine: (
                        [mine] if runtime.replay.under_way else runtime.ranks.collect("logs of an epoch", mine)
                    ),
                )
                means = {name: value for name, value in logs.items() if isinstance(value, float)}
                told = runtime.replay.reported(torch.tensor(list(means.values()), dtype=torch.float64, device="cpu"))
                logs.update(zip(means, told.tolist(), strict=True))
            on_epoch_end.__wrapped__(callbacks, epoch, logs)

    def _average_statistics(self, model: Any) -> None:
        """Average over ranks what layers record during training, such as the means of BatchNormalization."""
        if self.runtime.replay.under_way:  # a replay of the script runs up to a saved state, which has these averages
            return
        self.runtime.claim()
        variables = [v for v in model.non_trainable_variables if "float" in str(v.dtype)]
        on_torch = all(isinstance(v.value, torch.Tensor) for v in variables)
        tensors = [v.value.data if on_torch else to_torch(v) for v in variables]
        with torch.no_grad():
            take_means(self.runtime.ranks, tensors, "statistics of layers")
        for variable, tensor in zip(variables, tensors, strict=True) if not on_torch else ():
            variable.assign(to_numpy(tensor))


def inner_of(optimizer: Any) -> Any:
    """Return the optimizer that applies gradients: the inner optimizer of a LossScaleOptimizer, otherwise this
    optimizer."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def momentum_of(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's momentum and whether it is Nesterov momentum, under the keys of torch's parameter
    groups."""
    inner = inner_of(optimizer)
    momentum: Any = getattr(inner, "beta_1", None) or getattr(inner, "momentum", 0.0)
    nesterov = getattr(inner, "nesterov", False) or type(inner).__name__ == "Nadam"
    return {"momentum": float(momentum), "nesterov": bool(nesterov)}


def averaged(logs: Any, collect: Callable[[dict[str, float]], Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Return the logs with their numbers replaced by the means over ranks. collect: function that takes this rank's
    numbers and returns all ranks' numbers."""
    numbers = {name: float(value) for name, value in logs.items() if not tuple(getattr(value, "shape", ()))}
    every = collect(numbers)
    return {**logs, **{name: sum(each[name] for each in every) / len(every) for name in numbers}}
