"""Predicts the weights to which a late gradient will be applied, so that the gradient is computed at these weights.
There is a module for each method of prediction."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from dadt.config import Config
from dadt.config.check import predict_factors, predict_share
from dadt.errors import ConfigError
from dadt.train.prediction.base import Prediction
from dadt.train.prediction.displacement import Displacement, auto_factors
from dadt.train.prediction.expectation import Expectation, share_of
from dadt.train.prediction.next_step import known
from dadt.train.stand_in import name_of


def choose(
    config: Config, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], ranks: int
) -> Prediction:
    """Return the prediction that --predict selects. With `auto`, this is the optimizer's own next step if it can be
    computed, otherwise one from the last changes of the weights.

    Raises ConfigError for `own` if the optimizer's step is not known.
    """
    factors, share = predict_factors(config.predict), predict_share(config.predict)
    if share is None and factors is None and known(optimizer):
        share = share_of(ranks)
    if share is None:
        found = weakref.ref(optimizer)

        def by_momentum() -> tuple[float, float]:
            of = found()
            return (0.0, 0.0) if of is None else auto_factors(of)

        return Displacement(parameters, by_momentum if factors is None else lambda: factors)
    if not known(optimizer):
        raise ConfigError(
            f"--predict {config.predict} knows the steps of SGD, Adam and AdamW, not of {name_of(optimizer)}:"
            " leave --predict at auto"
        )
    return Expectation(optimizer, parameters, share)


__all__ = ["Prediction", "choose"]
