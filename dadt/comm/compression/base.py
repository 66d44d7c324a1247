"""The interface of a codec: the core's own for host tensors, and the same in torch operations for those of a GPU."""

from __future__ import annotations

from typing import Protocol

import torch

from dadt import _core

BLOCK = _core.BLOCK
WIDE = (torch.float32, torch.float64)
"""Weights that a gossip compresses."""
FLOATS = (*WIDE, torch.float16, torch.bfloat16)
"""Gradients that are compressed, where that takes fewer bytes."""


class Codec(Protocol):
    """A finite number stays one, and what is none stays none. Both sides give the same bits."""

    core: _core.Codec

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """(blocks, BLOCK) of float32 to (blocks, block_bytes) of uint8, on their device."""

    def decode(self, wire: torch.Tensor) -> torch.Tensor:
        """(blocks, block_bytes) of uint8, as `encode` gives them, to (blocks, BLOCK) of float32, on their device."""
