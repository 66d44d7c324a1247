"""A gradient tape whose gradients are reduced over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf  # type: ignore[import-untyped,import-not-found,unused-ignore]

from dadt.frontends.tensorflow.operations import allreduce_all, called


class DistributedGradientTape:
    """A tf.GradientTape whose `gradient` returns means over all ranks, for all sources in one operation and without
    delay. Everything else is the tape's own. reduction: mean or sum. Sparse gradients become dense."""

    def __init__(self, tape: Any, *, reduction: str = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"DistributedGradientTape: reduction {reduction}: choose mean or sum")
        self._tape, self._reduction = tape, reduction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._tape.__exit__(*error)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **options: Any) -> Any:
        """Return the gradients that tf.GradientTape.gradient computes, reduced over all ranks. A source without a
        gradient on this rank counts as zeros."""
        found = self._tape.gradient(target, sources, output_gradients, **options)
        flat, places = tf.nest.flatten(found), tf.nest.flatten(sources)
        dense = [tf.zeros_like(s) if g is None else tf.convert_to_tensor(g) for g, s in zip(flat, places, strict=True)]
        return tf.nest.pack_sequence_as(sources, allreduce_all(dense, self._reduction, called(None, "tape")))
