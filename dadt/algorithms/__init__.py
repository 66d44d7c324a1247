"""What is exchanged, when, and how it is applied. Each algorithm is one file and one line here."""

from __future__ import annotations

from dadt.algorithms.base import Algorithm
from dadt.algorithms.pipe import Pipe
from dadt.algorithms.sync import Sync

ALGORITHMS: dict[str, type[Algorithm]] = {"pipe": Pipe, "sync": Sync}

__all__ = ["ALGORITHMS", "Algorithm"]
