"""Every knob, its checks, and the executor chosen from them. Imports no torch."""

from dadt.config.config import Config

__all__ = ["Config"]
