"""When weights are predicted ones: from a training forward to the step, but for what the script sees in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dadt.train.prediction.base import Prediction


class PredictionScope:
    """Counts what is under way on the training thread; other threads change nothing."""

    def __init__(self, predictions: Callable[[], Sequence[Prediction]], on_training_thread: Callable[[], bool]) -> None:
        """predictions: those of all optimizers that train. on_training_thread: whether it is called on that thread."""
        self._predictions = predictions
        self._on_training_thread = on_training_thread
        self._passes = 0
        """Training forwards and backwards under way."""
        self._backwards = 0
        self._looks = 0
        """Forwards under way that train nothing."""
        self._stepped = False
        """An optimizer has stepped in the midst of a pass."""

    def stepped(self) -> None:
        """A step is over: the script may derive something from weights, as target networks after the steps of two
        optimizers."""
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
        """A training forward, or a backward: weights stay as they are, also where an optimizer steps in its midst."""
        here = self._on_training_thread()
        self._passes += here
        try:
            yield
        finally:
            self._passes -= here
            if self._stepped and not self._passes:
                self.stepped()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward through the weights that its forward saw, though another optimizer has stepped since, as in
        the training of GANs."""
        mine = []
        if not self._looks and self._on_training_thread():
            mine = [prediction for prediction in self._predictions() if prediction.suspended]
        for prediction in mine:
            prediction.resume()
        here = self._on_training_thread()
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
        """A forward that trains nothing: at true weights, also what it differentiates inside."""
        here = self._on_training_thread()
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
