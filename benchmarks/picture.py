"""Draws pictures of benchmarks with matplotlib: panels side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def panels(path: Path, size: tuple[float, float], count: int = 1, dpi: int = 110) -> Iterator[list[Any]]:
    """Context manager that yields axes to draw on, and writes the picture at the end. size: in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    yield list(axes[0])
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
