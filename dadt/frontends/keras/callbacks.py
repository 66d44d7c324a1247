"""Callbacks of scripts that train a Keras model on several ranks, with the names and arguments of Horovod's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras  # type: ignore[import-untyped,import-not-found,unused-ignore]

from dadt.api import lifecycle, state
from dadt.frontends.keras import fit
from dadt.frontends.keras.operations import broadcast_variables


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Sends the root's variables of model and optimizer to all ranks when training begins."""

    def __init__(self, root_rank: int = 0, device: str = "") -> None:
        """device: accepted for scripts written for Horovod, and not used."""
        super().__init__()
        self._root = root_rank
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the variables when training begins, or after the first batch if the model is not built before and
        so has no variables."""
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        self._done = True
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        broadcast_variables([*self.model.variables, *optimizer.variables], self._root)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Replaces the metrics of an epoch by their means over ranks. List it before callbacks that read the metrics."""

    def __init__(self, device: str = "") -> None:
        """device: accepted for scripts written for Horovod, and not used."""
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs:
            logs.update(fit.averaged(logs, state.allgather_object))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Sets the learning rate to a multiple of the initial one, from `start_epoch` to `end_epoch`.

    multiplier: a number, or a function of the epoch. staircase: whether the rate changes once per epoch; otherwise it
    changes with each batch, and `multiplier` gets the epoch with a fraction. momentum_correction: whether momentum is
    scaled like the rate in the batch in which the rate changes (arXiv:1706.02677); not on TensorFlow. steps_per_epoch:
    by default the number that `fit` counts.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self._initial = initial_lr
        self._multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        # A constant multiplier changes the learning rate only once, so the rate need not be set again at each batch.
        self._staircase = staircase or not callable(multiplier)
        self._first, self._last = start_epoch, end_epoch
        # A TensorFlow graph keeps the momentum that the optimizer had when the graph was traced, so a change would have
        # no effect.
        self._corrects = momentum_correction and keras.backend.backend() == "torch"
        self._steps = steps_per_epoch
        self._epoch = 0
        self._momentum: float | None = None
        """Value of the momentum before it was scaled for the current batch; None if the momentum is not scaled."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        inside = self._first <= self._epoch and (self._last is None or self._epoch < self._last)
        if not inside or (self._staircase and batch):
            return
        self._adjust(self._epoch if self._staircase else self._epoch + batch / self._steps_of_epoch())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _steps_of_epoch(self) -> int:
        steps = self._steps or (self.params or {}).get("steps")
        if not steps:
            raise ValueError(f"{type(self).__name__}: the steps of an epoch are not known here; give steps_per_epoch")
        return int(steps)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, after = float(optimizer.learning_rate), self._initial * self._multiplier(epoch)
        optimizer.learning_rate = after
        if self._corrects and before and getattr(optimizer, "momentum", 0.0):
            self._momentum = optimizer.momentum
            optimizer.momentum *= after / before


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size to initial_lr in the first epochs (arXiv:1706.02677)."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # Count the current batch as done, so that the multiplier reaches 1 in the last batch of the last warm-up
            # epoch.
            epoch += 1.0 / self._steps_of_epoch()
            ranks = lifecycle.size()
            return (epoch * (ranks - 1) / warmup_epochs + 1) / ranks

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, staircase=False,
            momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch,
        )  # fmt: skip
        self._end, self._verbose = warmup_epochs, verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self._end - 1 and self._verbose and lifecycle.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            lifecycle.session().runtime.ranks.say(f"epoch {epoch + 1}: the learning rate has warmed up to {rate:g}")
