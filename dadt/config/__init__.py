"""Every setting (knob) of DADT, its checks, and the choice of the executor. Imports no torch."""

from dadt.config.config import Config

__all__ = ["Config"]
