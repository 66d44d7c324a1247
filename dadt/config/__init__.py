"""Every setting (knob) of DADT, its checks, and the choice of the executor. Does not import torch."""

from dadt.config.config import Config

__all__ = ["Config"]
