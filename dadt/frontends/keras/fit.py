"""Keras on torch, in scripts that say nothing of DADT: optimizers average where they apply gradients, `fit` divides its
data and what it is told of each epoch is the mean of all ranks, and each rank evaluates all data."""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dadt.frontends.keras import order
from dadt.frontends.tensorflow.memory import to_numpy, to_torch
from dadt.inject import worker
from dadt.inject.foreign import Carrier
from dadt.train.common_values import take_means
from dadt.train.runtime import Runtime

_carriers: weakref.WeakKeyDictionary[Any, KerasCarrier] = weakref.WeakKeyDictionary()
enlisted: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Optimizers that the script has wrapped itself, and for each the factor by which its averages are multiplied."""
_stepping: list[Any] = []
"""The optimizers that are applying averages, the innermost last."""
_installed: list[Runtime] = []
BACKENDS = ("torch", "tensorflow")
_told: weakref.WeakSet[Any] = weakref.WeakSet()
"""Learning rate schedules about which the user has been warned."""
_fitting: list[Any] = []
"""Models whose `fit` is under way."""


class KerasCarrier(Carrier):
    """A carrier whose state is the variables of Keras's optimizer."""

    def __init__(self, owner: Any, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(weakref.proxy(owner), list(parameters), momentum_of(owner))

    def kept(self) -> dict[str, torch.Tensor]:
        return {f"{number} {v.path}": v.value.data for number, v in enumerate(self.owner.variables)}


def hook() -> None:
    """Call it once keras is imported. Does nothing with another backend than BACKENDS, and in a world of one."""
    keras = importlib.import_module("keras")
    runtime = worker.runtime
    if keras.backend.backend() in BACKENDS and runtime is not None and not runtime.ranks.alone:
        install(runtime)


def install(runtime: Runtime) -> None:
    """Hook into keras, once. In a script that calls `dadt.init` only optimizers that are enlisted are of concern."""
    keras = importlib.import_module("keras")
    if _installed:
        return
    _installed.append(runtime)
    order.install()
    if keras.backend.backend() == "tensorflow":
        importlib.import_module("dadt.frontends.keras.on_tensorflow").install(runtime)
        return
    for kind in optimizers_of(keras):
        _average_at(kind, runtime)
    keras.Model.fit = fitting(keras.Model.fit, runtime)
    keras.Model.evaluate = whole(keras.Model.evaluate, runtime)
    keras.Model.predict = whole(keras.Model.predict, runtime)
    keras.callbacks.CallbackList.on_epoch_end = told_alike(keras.callbacks.CallbackList.on_epoch_end, runtime)
    iterator = importlib.import_module("keras.src.trainers.epoch_iterator").EpochIterator
    iterator.reset = _divided(iterator.reset, runtime)


def optimizers_of(keras: Any) -> list[Any]:
    """Classes with an `apply` of their own. One that scales losses leaves out steps in which gradients are not finite:
    what it looks at are the averages, so that all ranks do."""
    return [keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer]


def left_alone(optimizer: Any, runtime: Runtime) -> bool:
    """Whether it applies gradients as they are: within another one's step, or where the script has not wrapped it."""
    return bool(_stepping) or (runtime.script.explicit and factor_of(optimizer) is None)


def factor_of(optimizer: Any) -> int | None:
    """The factor by which this optimizer's averages are multiplied; None unless the script has wrapped it, or the
    optimizer within it where it only scales losses."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return enlisted.get(optimizer, enlisted.get(inner))


def fitted() -> Any:
    """The model whose `fit` is under way."""
    return _fitting[-1]


def momentum_of(optimizer: Any) -> dict[str, Any]:
    """The optimizer's momentum and whether it is Nesterov's, as in a parameter group of torch."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    momentum: Any = getattr(inner, "beta_1", None) or getattr(inner, "momentum", 0.0)
    nesterov = getattr(inner, "nesterov", False) or type(inner).__name__ == "Nadam"
    return {"momentum": float(momentum), "nesterov": bool(nesterov)}


def divide_steps(iterator: Any, ranks: int) -> None:
    """Divide the steps per epoch that the script gave to `fit` by the number of ranks, once. Without them, nothing
    changes."""
    if iterator.steps_per_epoch and not getattr(iterator, "is_divided", False):
        iterator.steps_per_epoch = max(1, iterator.steps_per_epoch // ranks)
        iterator.is_divided = True


def tell_of_schedule(optimizer: Any, runtime: Runtime) -> None:
    """Warn, once for each schedule of the learning rate, that it counts a worker's steps, which are a share of all
    steps."""
    schedule = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    if isinstance(schedule, importlib.import_module("keras").optimizers.schedules.LearningRateSchedule):
        if schedule not in _told and not runtime.ranks.world.rank:
            ranks = runtime.ranks.world.world_size
            runtime.ranks.say(
                f"{type(schedule).__name__} counts the steps of a worker, of which an epoch has one for every {ranks}"
                f" batches: divide its numbers of steps by {ranks}",
                "warning",
            )
        _told.add(schedule)


@contextmanager
def within(optimizer: Any) -> Iterator[None]:
    """A context in which the optimizer applies averages."""
    _stepping.append(optimizer)
    try:
        yield
    finally:
        _stepping.pop()


def _average_at(optimizers: Any, runtime: Runtime) -> None:
    """Every optimizer of this class, and of those below it, averages gradients before it applies them."""
    original = optimizers.apply

    @functools.wraps(original)
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        if left_alone(self, runtime):
            return original(self, grads, trainable_variables)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        parameters = [v.value for v in variables]
        for parameter, gradient in zip(parameters, grads, strict=True):
            if gradient is not parameter.grad:
                parameter.grad = gradient
        carrier = _carrier_of(self, variables)

        def run() -> None:
            """Apply the averages. Where averages come a step late, the first step has none, and applies nothing."""
            gradients = [p.grad for p in parameters]
            if (factor := factor_of(self) or 1) != 1:
                gradients = [None if g is None else g * factor for g in gradients]
            if any(each is not None for each in gradients):
                with within(self):
                    original(self, gradients, variables)

        carrier.run = run
        try:
            carrier.step()
            return None
        finally:
            carrier.run = _nothing  # else it would keep its optimizer alive

    optimizers.apply = apply


def _nothing() -> None: ...


def _carrier_of(optimizer: Any, variables: Sequence[Any]) -> KerasCarrier:
    if optimizer not in _carriers:
        if not optimizer.built:
            optimizer.build(variables)
        carrier = _carriers[optimizer] = KerasCarrier(optimizer, [v.value for v in variables])
        if factor_of(optimizer) is not None:
            worker.wrap(carrier)
    return _carriers[optimizer]


def enlist(optimizer: Any, factor: int) -> None:
    """Train with this optimizer on all ranks, in a script that calls `dadt.init`. factor: of its averages."""
    enlisted.setdefault(optimizer, factor)


def fitting(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime.script.explicit:
            return original(self, *args, **kwargs)
        _fitting.append(self)
        runtime.script.fitting = True
        try:
            history = _said_once(original, runtime, self, *args, **kwargs)
            _average_statistics(self, runtime)
            return history
        finally:
            _fitting.pop()
            runtime.script.fitting = bool(_fitting)

    return fit


def whole(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """A pass that begins without gradients is not divided."""

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime.script.explicit:
            return original(self, *args, **kwargs)
        if self in _fitting:
            _average_statistics(self, runtime)
        with torch.no_grad():
            return _said_once(original, runtime, self, *args, **kwargs)

    return run


def _said_once(original: Callable[..., Any], runtime: Runtime, *args: Any, **kwargs: Any) -> Any:
    """All ranks would show the same."""
    if not runtime.ranks.world.rank:
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs)
    given.arguments["verbose"] = 0
    return original(*given.args, **given.kwargs)


def told_alike(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Callbacks that stop, or change the learning rate, do so on all ranks."""

    @functools.wraps(original)
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        if _fitting and logs:
            runtime.claim()  # a step without an optimizer does not
            alone, ranks = runtime.replay.under_way, runtime.ranks
            logs = averaged(logs, lambda mine: [mine] if alone else ranks.collect("logs of an epoch", mine))
            means = {name: value for name, value in logs.items() if isinstance(value, float)}
            told = runtime.replay.reported(torch.tensor(list(means.values()), dtype=torch.float64, device="cpu"))
            logs.update(zip(means, told.tolist(), strict=True))
        original(self, epoch, logs)

    return on_epoch_end


def averaged(logs: Any, collect: Callable[[dict[str, float]], Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Logs, with the means over ranks of what are numbers. collect: gives those of all ranks."""
    numbers = {name: float(value) for name, value in logs.items() if not tuple(getattr(value, "shape", ()))}
    every = collect(numbers)
    return {**logs, **{name: sum(each[name] for each in every) / len(every) for name in numbers}}


def _divided(original: Callable[[Any], None], runtime: Runtime) -> Callable[[Any], None]:
    """The number of batches of an epoch is that of a rank. Its data is divided as the optimizer is known by now."""

    @functools.wraps(original)
    def reset(self: Any) -> None:
        original(self)
        if not _fitting or not torch.is_grad_enabled():
            return
        model = _fitting[-1]
        if model.optimizer is not None and model.trainable_variables:
            _carrier_of(model.optimizer, model.trainable_variables)
        if runtime.ranks.config.batch != "global":
            divide_steps(self, runtime.ranks.world.world_size)
            tell_of_schedule(model.optimizer, runtime)
        # The length of a script's own DataLoader is that of a rank already.
        counted = type(self.data_adapter).__name__ == "TorchDataLoaderAdapter"
        if self._num_batches and not counted and runtime.ranks.config.batch != "global":
            self._num_batches = -(-self._num_batches // runtime.ranks.world.world_size)

    return reset


def _average_statistics(model: Any, runtime: Runtime) -> None:
    """What layers count beside training, such as the means of BatchNormalization."""
    if runtime.replay.under_way:  # it comes with the state
        return
    runtime.claim()
    variables = [v for v in model.non_trainable_variables if "float" in str(v.dtype)]
    on_torch = all(isinstance(v.value, torch.Tensor) for v in variables)
    tensors = [v.value.data if on_torch else to_torch(v) for v in variables]
    with torch.no_grad():
        take_means(runtime.ranks, tensors, "statistics of layers")
    for variable, tensor in zip(variables, tensors, strict=True) if not on_torch else ():
        variable.assign(to_numpy(tensor))
