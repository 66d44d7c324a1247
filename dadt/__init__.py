"""Asynchronous data-parallel training for PyTorch scripts that nobody has to change."""

from dadt.config import Config
from dadt.errors import DadtError
from dadt.world import World

__version__ = "0.1.0"
__all__ = ["Config", "DadtError", "World", "__version__"]
