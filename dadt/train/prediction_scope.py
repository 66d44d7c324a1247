"""Decides when parameters contain predicted weights: from a training forward to the step, except while the script reads
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dadt.train.prediction.base import Prediction
from dadt.train.script import Script


class PredictionScope:
    """Counts the forwards and backwards under way on the training thread; calls on other threads have no effect."""

    def __init__(self, predictions: Callable[[], Sequence[Prediction]], script: Script) -> None:
        """predictions: function that returns the predictions of all training optimizers."""
        self._predictions = predictions
        self._script = script
        self._passes = 0
        """Number of training forwards and backwards under way."""
        self._backwards = 0
        self._looks = 0
        """Number of forwards under way that train nothing."""
        self._stepped = False
        """Whether an optimizer has stepped during a training forward or backward."""

    def stepped(self) -> None:
        """Put the true weights into the parameters after a step, because the script may copy them, for example to
        target networks after the steps of two optimizers."""
        self._stepped = self._passes > 0
        if not self._stepped:
            for prediction in self._predictions():
                prediction.suspend()

    @property
    def under_way(self) -> bool:
        """Whether a training forward or a backward is under way on the training thread."""
        return self._passes > 0

    @property
    def in_backward(self) -> bool:
        return self._backwards > 0

    @contextmanager
    def training_pass(self) -> Iterator[None]:
        """Context of a training forward or a backward. The parameters contain the same weights until its end, even if
        an optimizer steps meanwhile."""
        here = self._script.on_training_thread
        self._passes += here
        try:
            yield
        finally:
            self._passes -= here
            if self._stepped and not self._passes:
                self.stepped()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward, in which parameters contain the weights that its forward used, even if another
        optimizer has stepped since, as in GAN training."""
        mine = []
        if not self._looks and self._script.on_training_thread:
            mine = [prediction for prediction in self._predictions() if prediction.suspended]
        for prediction in mine:
            prediction.resume()
        here = self._script.on_training_thread
        self._backwards += here
        try:
            with self.training_pass():
                yield
        finally:
            self._backwards -= here
            for prediction in mine:
                prediction.suspend()

    @contextmanager
    def true_weights(self, predictions: Sequence[Prediction]) -> Iterator[None]:
        """Context of a forward that trains nothing, in which parameters contain the true weights, also for gradients
        computed in this context."""
        here = self._script.on_training_thread
        mine = [prediction for prediction in predictions if prediction.applied]
        for prediction in mine:
            prediction.suspend()
        self._looks += here
        try:
            yield
        finally:
            self._looks -= here
            for prediction in mine:
                prediction.resume()
