"""Parameters that another optimizer predicts for a while."""

from __future__ import annotations

import torch

from dadt.train.prediction.displacement import Displacement


def test_all_of_them_are_predicted_anew_once_they_are_back() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    prediction = Displacement([parameter], lambda: (1.0, 0.0))

    def step() -> list[float]:
        """Return the weights of the next forward."""
        prediction.before_step(late=True, scale=None)
        parameter.data += 1
        prediction.after_step(held=False, scale=None)
        prediction.apply()
        return parameter.tolist()

    assert step() == [2, 2, 2]
    prediction.release({id(parameter)})
    prediction.follow([parameter])
    prediction.apply()
    assert parameter.tolist() == [1, 1, 1]
    assert step() == [3, 3, 3]
