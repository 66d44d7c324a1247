"""How large a learning rate gradients bear that come late: the limit at which a parabola's valley is left."""

from __future__ import annotations

import numpy as np

_LARGEST = 8.0
_STEPS = 400


def limit(momentum: float, delay: int, factor: float, older: float = 0.0, *, nesterov: bool = False) -> float:
    """The largest stable learning rate, in units of 1/curvature.

    momentum: the optimizer's, or its first beta. delay: steps by which gradients are late; they are computed `factor`
    last displacements and `older` ones before ahead. Without either: 2(1+m); without prediction: 1-m at delay 1.
    """
    ahead = np.array([1 + factor, older - factor, -older])
    if nesterov:  # its step goes by (1+m) y(t-delay) - m y(t-delay-1)
        ahead = np.polymul(np.array([1 + momentum, -momentum]), ahead)
    rates = np.geomspace(1e-6, _LARGEST, _STEPS)
    unstable = (i for i, rate in enumerate(rates) if not _stable(rate, momentum, delay, ahead))
    first = next(unstable, _STEPS)
    if first in (0, _STEPS):
        return float(rates[min(first, _STEPS - 1)])
    low, high = float(rates[first - 1]), float(rates[first])
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _stable(middle, momentum, delay, ahead) else (low, middle)
    return low


def _stable(rate: float, momentum: float, delay: int, ahead: np.ndarray) -> bool:
    """All roots of the recursion x(t+1) - x(t) = m (x(t) - x(t-1)) - rate y(t-delay) are inside the unit circle.

    ahead: y as a combination of x(t), x(t-1), ...
    """
    moving = np.zeros(delay + len(ahead) + 1)
    moving[:3] = (1, -(1 + momentum), momentum)
    moving[-len(ahead) :] += rate * ahead
    return bool(np.abs(np.roots(moving)).max() <= 1 + 1e-9)
