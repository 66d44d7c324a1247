"""Asynchronous data-parallel training for PyTorch scripts that nobody has to change."""

import sys
from typing import TYPE_CHECKING, Any

from dadt.config import Config
from dadt.errors import DadtError
from dadt.world import World

__version__ = "0.1.0"
__all__ = ["Config", "DadtError", "World", "__version__", "run"]

if TYPE_CHECKING:
    from dadt.function import run

_torch = sys.modules.get("torch")
# At the end of its own import torch imports this package by itself, in every process of this Python.
asked_for = _torch is None or not getattr(_torch.__spec__, "_initializing", False)
"""The program imports dadt itself. Under mpirun, srun or torchrun this is what makes it train data-parallel."""

if _torch is not None and asked_for:
    from dadt.inject import hook

    hook()
del _torch


def __getattr__(name: str) -> Any:
    """What only some programs need is imported when they do."""
    if name == "run":
        from dadt.function import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
