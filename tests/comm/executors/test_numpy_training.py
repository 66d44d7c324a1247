"""Two ranks learn a linear model with NumPy alone, torch's import blocked: the core really is free of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
from harness.patience import PATIENCE
from harness.ranks import spawn
from numpy.typing import NDArray

STEPS, RATE, ROWS, FEATURES = 200, 0.1, 64, 10
Array = NDArray[Any]


def data(rank: int) -> tuple[Array, Array]:
    random = np.random.default_rng(rank)
    x = random.standard_normal((ROWS, FEATURES))
    y = x @ np.arange(FEATURES) + 3 + 0.01 * random.standard_normal(ROWS)
    return x, y


def gradient(weights: Array, bias: Array, x: Array, y: Array) -> list[Array]:
    residual = x @ weights + bias - y
    return [x.T @ residual / len(y), np.array([residual.mean()])]


def train(engine: Any, rank: int, world_size: int) -> tuple[bytes, list[float]]:
    """Pipe-SGD by hand: the gradient of step t-1 is averaged while step t's is computed."""
    from dadt import _core

    assert "torch" not in sys.modules
    sys.modules["torch"] = None  # type: ignore[assignment]
    x, y = data(rank)
    weights, bias = np.random.default_rng(100 + rank).standard_normal(FEATURES), np.zeros(1)
    layout = _core.Layout(_core.DType.float64, [FEATURES, 1])
    engine.broadcast(layout, [weights.ctypes.data, bias.ctypes.data], 0, "start").wait(PATIENCE)
    losses, pending = [], None
    for step in range(STEPS):
        mine = gradient(weights, bias, x, y)
        losses.append(float(np.mean((x @ weights + bias - y) ** 2)))
        if pending is not None:
            work, means, _ = pending
            work.wait(PATIENCE)
            weights -= RATE * means[0]
            bias -= RATE * means[1]
        means = [np.empty_like(g) for g in mine]
        work = engine.allreduce(layout, [g.ctypes.data for g in mine], [m.ctypes.data for m in means], f"step {step}")
        pending = work, means, mine  # the inputs live until the work is done
    assert pending is not None
    pending[0].wait(PATIENCE)
    engine.close(PATIENCE)
    return weights.tobytes() + bias.tobytes(), losses


def alone() -> bytes:
    """The same on one process: the mean of both ranks' gradients, one step late."""
    shares = [data(0), data(1)]
    weights, bias = np.random.default_rng(100).standard_normal(FEATURES), np.zeros(1)
    pending: list[Array] | None = None
    for _ in range(STEPS):
        one, two = (gradient(weights, bias, x, y) for x, y in shares)
        if pending is not None:
            weights -= RATE * pending[0]
            bias -= RATE * pending[1]
        pending = [(a + b) * 0.5 for a, b in zip(one, two, strict=True)]
    return weights.tobytes() + bias.tobytes()


def test_two_ranks_train_without_torch() -> None:
    (first, losses), (second, _) = spawn(2, train, alone=True)
    assert first == second
    assert losses[-1] < 1e-2 * losses[0]
    assert first == alone()
    np.testing.assert_allclose(np.frombuffer(first)[:FEATURES], np.arange(FEATURES), atol=0.05)


def test_the_package_and_the_core_load_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import dadt, dadt._core; print(dadt._core.simd)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0
    code = "import sys, dadt, dadt._core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0
