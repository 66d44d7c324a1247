"""Every knob, its checks, and what is chosen from them. No torch."""

from dadt.config.config import Config

__all__ = ["Config"]
