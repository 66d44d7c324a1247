"""How large a learning rate gradients bear that come late: the limit at which a parabola's valley is left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_LARGEST = 8.0
_STEPS = 400


def limit(momentum: float, delay: int, factor: float, older: float = 0.0, *, nesterov: bool = False) -> float:
    """The largest stable learning rate, in units of 1/curvature, where displacements predict.

    momentum: the optimizer's, or its first beta. delay: steps by which gradients are late; they are computed `factor`
    last displacements and `older` ones before ahead. Without either: 2(1+m); without prediction: 1-m at delay 1.
    """
    ahead = np.array([1 + factor, older - factor, -older])
    if nesterov:  # its step goes by (1+m) y(t-delay) - m y(t-delay-1)
        ahead = np.polymul(np.array([1 + momentum, -momentum]), ahead)
    moving = np.zeros(delay + len(ahead) + 1)
    moving[:3] = (1, -(1 + momentum), momentum)

    def radius(rate: float) -> float:
        """Of the recursion x(t+1) - x(t) = m (x(t) - x(t-1)) - rate y(t-delay), with y of x(t), x(t-1), ..."""
        polynomial = moving.copy()
        polynomial[-len(ahead) :] += rate * ahead
        return float(np.abs(np.roots(polynomial)).max())

    return _first_unstable(radius)


def limit_by_own(momentum: float, share: float, damping: float, *, nesterov: bool = False) -> float:
    """The same at delay 1 where the optimizer's own step predicts, with this share of the gradient in flight.

    Two things must not grow: the distance of the weights from the minimum, and what the ranks' own gradients differ by
    (which, from one step to the next, `damping` keeps in check: see dadt/train/prediction/expectation.py).
    """

    def step(rate: float, buffer: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The momentum's buffer and the move of the weights."""
        buffer = momentum * buffer + gradient
        return buffer, -rate * (gradient + momentum * buffer if nesterov else buffer)

    def of_the_mean(rate: float) -> float:
        """Of the map of weight, buffer and the last two gradients; a parabola's gradient is where it is taken."""
        weight, buffer, last, older = np.eye(4)
        gradient = weight + step(rate, buffer, share * last + (1 - share) * older)[1]
        moved, move = step(rate, buffer, last)
        return float(np.abs(np.linalg.eigvals(np.stack([weight + move, moved, gradient, last]))).max())

    def of_the_difference(rate: float) -> float:
        """Of d(t+1) = -rate' share (d(t) + damping d(t-1)): the momentum's buffer is the same on all ranks."""
        moves = rate * share * (1 + momentum if nesterov else 1)
        return float(np.abs(np.roots([1, moves, moves * damping])).max())

    return _first_unstable(lambda rate: max(of_the_mean(rate), of_the_difference(rate)))


def _first_unstable(radius: Callable[[float], float]) -> float:
    """The rate at which the spectral radius first grows beyond 1."""

    def stable(rate: float) -> bool:
        return radius(rate) <= 1 + 1e-9

    rates = np.geomspace(1e-6, _LARGEST, _STEPS)
    first = next((i for i, rate in enumerate(rates) if not stable(rate)), _STEPS)
    if first in (0, _STEPS):
        return float(rates[min(first, _STEPS - 1)])
    low, high = float(rates[first - 1]), float(rates[first])
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low
