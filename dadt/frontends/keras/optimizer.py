"""`dadt.keras.DistributedOptimizer`, for scripts that wrap their Keras optimizers themselves."""

from __future__ import annotations

from typing import Any, TypeVar

import keras  # type: ignore[import-untyped,import-not-found,unused-ignore]

from dadt.api.lifecycle import session, size
from dadt.frontends.keras import hook

T = TypeVar("T")


def DistributedOptimizer(optimizer: T, *, reduction: str = "mean") -> T:
    """Train with this optimizer on all ranks. Returns the same object.

    Gradients are averaged by `--algorithm` before the optimizer clips and applies them: `pipe` averages them one step
    late and predicts weights, `sync` at once. Before the first step all ranks take rank 0's weights. All ranks wrap the
    same optimizers in the same order. reduction: mean, or sum, which multiplies the averages by the number of ranks.

    Raises TypeError if `optimizer` is none of Keras's optimizers, and DadtError before `init`.
    """
    runtime = session().runtime
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"DistributedOptimizer: give one of Keras's optimizers, not {type(optimizer).__name__}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"DistributedOptimizer: reduction {reduction}: choose mean or sum")
    if not runtime.ranks.alone:
        hook.install(runtime).enlist(optimizer, size() if reduction == "sum" else 1)
    return optimizer


def wrapped(model: Any) -> Any:
    """Wrap the model's optimizer, so that it trains on all ranks, and return the model."""
    model.optimizer = DistributedOptimizer(model.optimizer)
    return model
