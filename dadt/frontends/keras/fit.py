"""Keras on torch, in scripts that say nothing of DADT: optimizers average where they apply gradients, `fit` divides its
data and what it is told of each epoch is the mean of all ranks, and each rank evaluates all data."""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dadt.inject import worker
from dadt.inject.foreign import Carrier
from dadt.train.runtime import Runtime

_carriers: weakref.WeakKeyDictionary[Any, Carrier] = weakref.WeakKeyDictionary()
_fitting: list[Any] = []
"""Models whose `fit` is under way."""


def hook() -> None:
    """Call it once keras is imported. Does nothing with another backend than torch, and in a world of one."""
    keras = importlib.import_module("keras")
    runtime = worker.runtime
    if keras.backend.backend() != "torch" or runtime is None or runtime.alone:
        return
    _average_at(keras.optimizers.Optimizer, runtime)
    keras.Model.fit = _fit(keras.Model.fit, runtime)
    keras.Model.evaluate = _whole(keras.Model.evaluate, runtime)
    keras.Model.predict = _whole(keras.Model.predict, runtime)
    keras.callbacks.CallbackList.on_epoch_end = _told_alike(keras.callbacks.CallbackList.on_epoch_end, runtime)
    iterator = importlib.import_module("keras.src.trainers.epoch_iterator").EpochIterator
    iterator.reset = _divided(iterator.reset, runtime)


def _average_at(optimizers: Any, runtime: Runtime) -> None:
    """Every optimizer of this class, and of those below it, averages gradients before it applies them."""
    original = optimizers.apply

    @functools.wraps(original)
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        parameters = [v.value for v in variables]
        for parameter, gradient in zip(parameters, grads, strict=True):
            if gradient is not parameter.grad:
                parameter.grad = gradient
        carrier = _carrier_of(self, parameters)

        def run() -> None:
            """Where a step is late, the first one has no gradients."""
            gradients = [p.grad for p in parameters]
            if any(each is not None for each in gradients):
                original(self, gradients, variables)

        carrier.run = run
        try:
            carrier.step()
        finally:
            carrier.run = _nothing  # else it would keep its optimizer alive

    optimizers.apply = apply


def _nothing() -> None: ...


def _carrier_of(optimizer: Any, parameters: Sequence[torch.Tensor]) -> Carrier:
    if optimizer not in _carriers:
        _carriers[optimizer] = Carrier(weakref.proxy(optimizer), list(parameters))
    return _carriers[optimizer]


def _fit(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        _fitting.append(self)
        try:
            history = _said_once(original, runtime, self, *args, **kwargs)
            _average_statistics(self, runtime)
            return history
        finally:
            _fitting.pop()

    return fit


def _whole(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """A pass that begins without gradients is not divided."""

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self in _fitting:
            _average_statistics(self, runtime)
        with torch.no_grad():
            return _said_once(original, runtime, self, *args, **kwargs)

    return run


def _said_once(original: Callable[..., Any], runtime: Runtime, *args: Any, **kwargs: Any) -> Any:
    """All ranks would show the same."""
    if not runtime.world.rank:
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs)
    given.arguments["verbose"] = 0
    return original(*given.args, **given.kwargs)


def _told_alike(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Callbacks that stop, or change the learning rate, do so on all ranks."""

    @functools.wraps(original)
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        if _fitting and logs:
            numbers = {name: float(value) for name, value in logs.items() if not getattr(value, "shape", ())}
            every = runtime.collect("logs of an epoch", numbers)
            logs = {**logs, **{name: sum(each[name] for each in every) / len(every) for name in numbers}}
        original(self, epoch, logs)

    return on_epoch_end


def _divided(original: Callable[[Any], None], runtime: Runtime) -> Callable[[Any], None]:
    """The number of batches of an epoch is that of a rank. Its data is divided as the optimizer is known by now."""

    @functools.wraps(original)
    def reset(self: Any) -> None:
        original(self)
        if not _fitting or not torch.is_grad_enabled():
            return
        model = _fitting[-1]
        if model.optimizer is not None and model.trainable_variables:
            _carrier_of(model.optimizer, [v.value for v in model.trainable_variables])
        # The length of a script's own DataLoader is that of a rank already.
        counted = type(self.data_adapter).__name__ == "TorchDataLoaderAdapter"
        if self._num_batches and not counted and runtime.config.batch != "global":
            self._num_batches = -(-self._num_batches // runtime.world.world_size)

    return reset


def _average_statistics(model: Any, runtime: Runtime) -> None:
    """What layers count beside training, such as the means of BatchNormalization."""
    tensors = [v.value.data for v in model.non_trainable_variables]
    with torch.no_grad():
        runtime.average([t for t in tensors if t.is_floating_point()], "statistics of layers")
