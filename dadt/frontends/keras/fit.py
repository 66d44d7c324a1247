"""Keras in scripts that say nothing of DADT, on any backend: `fit` divides its data, what it is told of each epoch is
the mean of all ranks, and each rank evaluates all data."""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dadt.frontends.tensorflow.memory import to_numpy, to_torch
from dadt.train.common_values import take_means
from dadt.train.runtime import Runtime


class KerasTraining(ABC):
    """Hooks into Keras in one process. In a script that calls `dadt.init` only wrapped optimizers are of concern."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._factors: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Optimizers that the script has wrapped itself, and for each the factor by which its averages are
        multiplied."""
        self._stepping: list[Any] = []
        """The optimizers that are applying averages, the innermost last."""
        self.fitting: list[Any] = []
        """Models whose `fit` is under way, the innermost last."""
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()
        """Learning rate schedules about which the user has been warned."""

    def install(self, keras: Any) -> None:
        """Replace what Keras does in training and evaluation."""
        # Classes with an `apply` of their own. One that scales losses leaves out steps in which gradients are not
        # finite: what it looks at are the averages, so that all ranks do.
        for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
            self.average_at(kind)
        keras.Model.fit = self.fits(keras.Model.fit)
        keras.Model.evaluate = self._whole(keras.Model.evaluate)
        keras.Model.predict = self._whole(keras.Model.predict)
        keras.callbacks.CallbackList.on_epoch_end = self._told_alike(keras.callbacks.CallbackList.on_epoch_end)

    @abstractmethod
    def average_at(self, optimizers: Any) -> None:
        """Have every optimizer of this class, and of those below it, average gradients before it applies them."""

    def enlist(self, optimizer: Any, factor: int) -> None:
        """Train with this optimizer on all ranks, in a script that calls `dadt.init`. factor: of its averages."""
        self._factors.setdefault(optimizer, factor)

    def left_alone(self, optimizer: Any) -> bool:
        """Whether it applies gradients as they are: within another one's step, or where the script has not wrapped
        it."""
        return bool(self._stepping) or (self.runtime.script.explicit and self.factor_of(optimizer) is None)

    def factor_of(self, optimizer: Any) -> int | None:
        """The factor by which this optimizer's averages are multiplied; None unless the script has wrapped it, or the
        optimizer within it where it only scales losses."""
        return self._factors.get(optimizer, self._factors.get(inner_of(optimizer)))

    @contextmanager
    def within(self, optimizer: Any) -> Iterator[None]:
        """A context in which the optimizer applies averages."""
        self._stepping.append(optimizer)
        try:
            yield
        finally:
            self._stepping.pop()

    def divide_steps(self, iterator: Any) -> None:
        """Divide the steps per epoch that the script gave to `fit` by the number of ranks, once. Without them, nothing
        changes. Warn, once for each schedule of the learning rate, that it counts a worker's steps."""
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

    def fits(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Stand in for `Model.fit`."""

        @functools.wraps(original)
        def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
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

        return fit

    def _whole(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A pass that begins without gradients is not divided."""

        @functools.wraps(original)
        def run(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self.runtime.script.explicit:
                return original(model, *args, **kwargs)
            if model in self.fitting:
                self._average_statistics(model)
            with torch.no_grad():
                return self._said_once(original, model, *args, **kwargs)

        return run

    def _said_once(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """All ranks would show the same."""
        if not self.runtime.ranks.world.rank:
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments["verbose"] = 0
        return original(*given.args, **given.kwargs)

    def _told_alike(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Callbacks that stop, or change the learning rate, do so on all ranks."""
        runtime = self.runtime

        @functools.wraps(original)
        def on_epoch_end(callbacks: Any, epoch: int, logs: Any = None) -> None:
            if self.fitting and logs:
                runtime.claim()  # a step without an optimizer does not
                logs = averaged(
                    logs,
                    lambda mine: (
                        [mine] if runtime.replay.under_way else runtime.ranks.collect("logs of an epoch", mine)
                    ),
                )
                means = {name: value for name, value in logs.items() if isinstance(value, float)}
                told = runtime.replay.reported(torch.tensor(list(means.values()), dtype=torch.float64, device="cpu"))
                logs.update(zip(means, told.tolist(), strict=True))
            original(callbacks, epoch, logs)

        return on_epoch_end

    def _average_statistics(self, model: Any) -> None:
        """What layers count beside training, such as the means of BatchNormalization."""
        if self.runtime.replay.under_way:  # it comes with the state
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
    """The optimizer that applies gradients, where this one only scales losses."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def momentum_of(optimizer: Any) -> dict[str, Any]:
    """The optimizer's momentum and whether it is Nesterov's, as in a parameter group of torch."""
    inner = inner_of(optimizer)
    momentum: Any = getattr(inner, "beta_1", None) or getattr(inner, "momentum", 0.0)
    nesterov = getattr(inner, "nesterov", False) or type(inner).__name__ == "Nadam"
    return {"momentum": float(momentum), "nesterov": bool(nesterov)}


def averaged(logs: Any, collect: Callable[[dict[str, float]], Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Return the logs with their numbers replaced by the means over ranks. collect: given this rank's numbers, returns
    those of all ranks."""
    numbers = {name: float(value) for name, value in logs.items() if not tuple(getattr(value, "shape", ()))}
    every = collect(numbers)
    return {**logs, **{name: sum(each[name] for each in every) / len(every) for name in numbers}}


def nothing() -> None: ...
