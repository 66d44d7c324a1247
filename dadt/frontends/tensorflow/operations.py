"""Operations on TensorFlow's tensors, in eager code and within tf.function, with gradients.

A graph calls Python, which passes its tensors to torch. Ranks match calls by name, because a graph may run its
operations in any order. Calls without a name are numbered as they are traced, the same on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf  # type: ignore[import-untyped,import-not-found,unused-ignore]
import torch

from dadt.api import collectives, lifecycle, state
from dadt.frontends.tensorflow.memory import to_numpy, to_torch

_traced: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of operations traced so far in each graph."""


def called(name: str | None, kind: str) -> str | None:
    """The name of an operation, by default the name of the graph and the operation's number in it, since ranks may
    trace a graph again at different times. None for unnamed operations of eager code, which are numbered as they run.
    """
    if name is not None or tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    _traced[graph] = _traced.get(graph, 0) + 1
    return f"{graph.name}, {kind} {_traced[graph]}"


def _part(name: str | None, what: str) -> str | None:
    return None if name is None else f"{name}, {what}"


def _call(function: Callable[..., Any], values: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """Call a Python function from a graph. Returns the function's tensors, with the dtypes of `values` and the given
    shapes."""
    results = tf.py_function(function, values, [value.dtype for value in values])
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def allreduce_all(values: Sequence[Any], reduction: str, name: str | None) -> list[Any]:
    """Reduce dense tensors over all ranks together in one operation, without gradients."""

    def run(*parts: Any) -> list[Any]:
        tensors = [to_torch(part) for part in parts]
        return [to_numpy(t) for t in collectives.grouped_all_reduce(tensors, reduction, name=name)]

    return _call(run, values, [value.shape for value in values]) if values else []


def allreduce(value: Any, reduction: str = "mean", *, name: str | None = None) -> Any:
    """Return the mean of the tensor over all ranks, or its sum, min, max or product.

    value: a tensor, variable, array or number; tf.IndexedSlices are made dense. The gradient of a mean is the mean of
    the gradients, and that of a sum their sum; others have none.
    """
    own = called(name, "allreduce")

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def run(x: Any) -> Any:
        def gradient(dy: Any) -> Any:
            if reduction not in ("mean", "sum"):
                raise ValueError(f"allreduce: {reduction} has no gradient")
            return allreduce_all([dy], reduction, _part(own, "gradient"))[0]

        return allreduce_all([x], reduction, own)[0], gradient

    return run(tf.convert_to_tensor(value))


def allgather(value: Any, *, name: str | None = None) -> Any:
    """Return the tensors of all ranks, joined along their first dimension, which may differ in size.

    The gradient is this rank's part of the gradients' sum over ranks.
    """
    own = called(name, "allgather")

    def gather(x: Any) -> Any:
        return to_numpy(torch.cat(collectives.all_gather(to_torch(x), name=own)))

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def run(x: Any) -> Any:
        length = tf.shape(x, out_type=tf.int64)[0]

        def gradient(dy: Any) -> Any:
            def part_of(dy: Any, length: Any) -> Any:
                lengths = state.allgather_object(int(length), name=_part(own, "lengths"))
                begin = sum(lengths[: lifecycle.rank()])
                summed = collectives.all_reduce(to_torch(dy), "sum", name=_part(own, "gradient"))
                return to_numpy(summed[begin : begin + int(length)])

            part = tf.py_function(part_of, [dy, length], dy.dtype)
            part.set_shape(x.shape)
            return part

        joined = tf.py_function(gather, [x], x.dtype)
        joined.set_shape([None, *x.shape[1:]])
        return joined, gradient

    return run(tf.convert_to_tensor(value))


def broadcast(value: Any, root_rank: int = 0, *, name: str | None = None) -> Any:
    """Return the root's tensor on all ranks. Its gradient is the sum of all ranks' gradients on the root, and zeros
    elsewhere."""
    own = called(name, "broadcast")

    def spread(x: Any) -> list[Any]:
        return [to_numpy(collectives.broadcast(to_torch(x), root_rank, name=own))]

    @tf.custom_gradient  # type: ignore[untyped-decorator,unused-ignore]
    def run(x: Any) -> Any:
        def gradient(dy: Any) -> Any:
            summed = allreduce_all([dy], "sum", _part(own, "gradient"))[0]
            return summed if lifecycle.rank() == root_rank else tf.zeros_like(summed)

        return _call(spread, [x], [x.shape])[0], gradient

    return run(tf.convert_to_tensor(value))
