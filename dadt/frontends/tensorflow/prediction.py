"""Weight prediction on TensorFlow: what a tape records is computed where weights will be when its gradients arrive.

Weights are predicted ones within the outermost `with tf.GradientTape()` alone: a backward works with the values that
its forward has read, but for layers that it computes once more. So whatever else reads weights sees true ones. On
variables, an assignment keeps no copy: it lets go of the memory that was there, or takes a tensor's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf  # type: ignore[import-untyped,import-not-found,unused-ignore]


class Displacement:
    """Predicts w + factor * (last displacement) + older * (the one before), as torch's class of this name."""

    def __init__(self, variables: Sequence[Any], factor: float, older: float) -> None:
        self._variables = variables
        self._factor, self._older_factor = factor, older
        self._last = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
        self._older = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables] if older else []
        self.ahead = tf.Variable(False, trainable=False)
        """The next gradient comes late."""

    def weights(self) -> list[Any]:
        return [tf.convert_to_tensor(v) for v in self._variables]

    def show(self) -> list[tuple[Any, Any]]:
        """Go to the predicted weights. Returns the true ones and these, for `hide`."""
        true = self.weights()

        def put() -> list[Any]:
            predicted = self._predicted(true)
            for variable, value in zip(self._variables, predicted, strict=True):
                variable.assign(value)
            return predicted

        return list(zip(true, _list(tf.cond(self.ahead, put, lambda: list(true))), strict=True))

    def hide(self, shown: Sequence[tuple[Any, Any]]) -> None:
        """Go back to the true weights. What a forward has assigned meanwhile stays, as that of a spectral norm."""

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
        """An optimizer has stepped, and moved the weights from where they were, if it has not left that step out."""

        def learn() -> Any:
            for older, last in zip(self._older, self._last, strict=False):  # there may be no older ones
                older.assign(last)
            for last, w, now in zip(self._last, before, self.weights(), strict=True):
                last.assign(now - w)
            return tf.constant(True)

        tf.cond(moved, learn, lambda: tf.constant(False))


_local = threading.local()
ANEW = "_dadt_anew"
"""Attribute of a function whose graphs are out of date: the one that takes its place."""


def install(displacements: Callable[[], Iterable[Displacement]]) -> None:
    """Predict within each tape. displacements: those of all optimizers that train."""
    _predict_within(tf.GradientTape, displacements)
    _watch_calls(type(tf.function(lambda: None)))


def show_true_weights() -> None:
    """An optimizer is about to step, maybe within a tape."""
    shown, _local.shown = getattr(_local, "shown", []), []
    for each, weights in reversed(shown):  # where two share variables, the later one has seen the other's
        each.hide(weights)


def trace_once_more() -> None:
    """Call this when variables become known during a trace, whose tape came before: the next call traces again."""
    for function in _calls():
        if not hasattr(function, ANEW):
            setattr(function, ANEW, function._clone(None))


def _calls() -> list[Any]:
    """The tf.functions under way on this thread."""
    if not hasattr(_local, "calls"):
        _local.calls = []
    calls: list[Any] = _local.calls
    return calls


def _predict_within(tape: Any, displacements: Callable[[], Iterable[Displacement]]) -> None:
    enter, leave = tape.__enter__, tape.__exit__

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        outermost = not getattr(_local, "depth", 0)
        if outermost:
            _local.shown = [(each, each.show()) for each in displacements()]
        try:
            entered = enter(self)
        except BaseException:
            if outermost:
                show_true_weights()
            raise
        _local.depth = 1 if outermost else _local.depth + 1
        return entered

    @functools.wraps(leave)
    def __exit__(self: Any, kind: Any, *error: Any) -> Any:
        result = leave(self, kind, *error)
        _local.depth -= 1
        if not _local.depth:
            show_true_weights()
        return result

    tape.__enter__, tape.__exit__ = __enter__, __exit__


def _watch_calls(function: Any) -> None:
    original = function.__call__

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (anew := getattr(self, ANEW, None)) is not None:
            return anew(*args, **kwargs)
        calls = _calls()
        calls.append(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            calls.pop()

    function.__call__ = __call__


def _list(values: Any) -> list[Any]:
    """tf.cond gives the one element of a list alone."""
    return list(values) if isinstance(values, list | tuple) else [values]
