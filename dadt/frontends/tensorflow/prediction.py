"""Weight prediction on TensorFlow: what a tape records is computed with the weights expected at the time when its
gradients arrive.

Weights are predicted only within the outermost `with tf.GradientTape()`. A backward pass uses the values that its
forward pass has read, except in layers that it computes again, so all other code sees the true weights. Assigning to a
variable makes no copy: TensorFlow drops the variable's memory, or uses the assigned tensor's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf  # type: ignore[import-untyped,import-not-found,unused-ignore]

from dadt.inject.patch import replaces


class Displacement:
    """Predicts weights as w + factor * (last change of w) + older * (the change before), like DADT's Displacement for
    torch."""

    def __init__(self, variables: Sequence[Any], factor: float, older: float) -> None:
        self._variables = variables
        self._factor, self._older_factor = factor, older
        self._last = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
        self._older = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables] if older else []
        self.ahead = tf.Variable(False, trainable=False)
        """Whether the next averaged gradients come late, so that weights are to be predicted."""

    def weights(self) -> list[Any]:
        return [tf.convert_to_tensor(v) for v in self._variables]

    def show(self) -> list[tuple[Any, Any]]:
        """Set the variables to the predicted weights. Returns the true and the predicted ones, for `hide`."""
        true = self.weights()

        def put() -> list[Any]:
            predicted = self._predicted(true)
            for variable, value in zip(self._variables, predicted, strict=True):
                variable.assign(value)
            return predicted

        return list(zip(true, _list(tf.cond(self.ahead, put, lambda: list(true))), strict=True))

    def hide(self, shown: Sequence[tuple[Any, Any]]) -> None:
        """Set the variables back to the true weights. If the forward pass has assigned a value to a variable, as a
        spectral norm does, this value stays."""

        def put() -> Any:
            for variable, (true, predicted), now in zip(self._variables, shown, self.weights(), strict=True):
                variable.assign(tf.where(now == predicted, true, now))
            return tf.constant(True)

        tf.cond(self.ahead, put, lambda: tf.constant(False))

    def _predicted(self, true: Sequence[Any]) -> list[Any]:
        found = [w + self._factor * last for w, last in zip(true, self._last, strict=True)]
        if not self._older:
            return found
        return [w + self._older_factor * older for w, older in zip(found, self._older, strict=True)]

    def stepped(self, before: Sequence[Any], moved: Any) -> None:
        """Record by how much an optimizer's step has changed the weights. before: the weights before the step. moved:
        whether the step was made, rather than left out."""

        def learn() -> Any:
            # `self._older` is empty if the factor `older` is 0
            for older, last in zip(self._older, self._last, strict=False):
                older.assign(last)
            for last, w, now in zip(self._last, before, self.weights(), strict=True):
                last.assign(now - w)
            return tf.constant(True)

        tf.cond(moved, learn, lambda: tf.constant(False))


_local = threading.local()
ANEW = "_dadt_anew"
"""Name of an attribute of a tf.function whose graphs are outdated. It contains the function to call in its place."""


def install(displacements: Callable[[], Iterable[Displacement]]) -> None:
    """Predict weights within each tape. displacements: function that returns the Displacement of each optimizer that
    trains."""
    _predict_within(tf.GradientTape, displacements)
    _watch_calls(type(tf.function(lambda: None)))


def show_true_weights() -> None:
    """Put the true weights back, when a tape ends or when an optimizer steps within a tape."""
    shown, _local.shown = getattr(_local, "shown", []), []
    # The order is reversed because, if two optimizers share variables, the later prediction started from the earlier
    # one.
    for each, weights in reversed(shown):
        each.hide(weights)


def trace_once_more() -> None:
    """Have the running tf.functions traced again at their next call. Call this when an optimizer gets its variables
    during a trace, since the trace's tape began without predicting these variables."""
    for function in _calls():
        if not hasattr(function, ANEW):
            setattr(function, ANEW, function._clone(None))


def _calls() -> list[Any]:
    """The tf.functions that this thread is running, the innermost last."""
    if not hasattr(_local, "calls"):
        _local.calls = []
    calls: list[Any] = _local.calls
    return calls


def _predict_within(tape: Any, displacements: Callable[[], Iterable[Displacement]]) -> None:
    @replaces("__enter__", tape)
    def enter(self: Any) -> Any:
        outermost = not getattr(_local, "depth", 0)
        if outermost:
            _local.shown = [(each, each.show()) for each in displacements()]
        try:
            entered = enter.__wrapped__(self)
        except BaseException:
            if outermost:
                show_true_weights()
            raise
        _local.depth = 1 if outermost else _local.depth + 1
        return entered

    @replaces("__exit__", tape)
    def leave(self: Any, kind: Any, *error: Any) -> Any:
        result = leave.__wrapped__(self, kind, *error)
        _local.depth -= 1
        if not _local.depth:
            show_true_weights()
        return result


def _watch_calls(function: Any) -> None:
    @replaces("__call__", function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (anew := getattr(self, ANEW, None)) is not None:
            return anew(*args, **kwargs)
        calls = _calls()
        calls.append(self)
        try:
            return call.__wrapped__(self, *args, **kwargs)
        finally:
            calls.pop()


def _list(values: Any) -> list[Any]:
    """Return the values as a list, since tf.cond returns a list of one element as the element alone."""
    return list(values) if isinstance(values, list | tuple) else [values]
