"""The interface of codecs: the C++ core's codec serves tensors in host memory, and torch operations compute the same
bits for tensors on a GPU."""

from __future__ import annotations

from typing import Protocol

import torch

from dadt import _core

BLOCK = _core.BLOCK
WIDE = (torch.float32, torch.float64)
"""Dtypes of the weights that the algorithm `gossip` compresses."""
FLOATS = (*WIDE, torch.float16, torch.bfloat16)
"""Dtypes of the gradients that are compressed, if compression saves bytes."""


class Codec(Protocol):
    """Encodes and decodes blocks of values. Finite values stay finite, infinities and NaN stay non-finite, and CPU and
    GPU produce the same bits."""

    core: _core.Codec

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode float32 values of shape (blocks, BLOCK) as uint8 of shape (blocks, block_bytes), on the same
        device."""

    def decode(self, wire: torch.Tensor) -> torch.Tensor:
        """Decode uint8 of shape (blocks, block_bytes), as `encode` returns, to float32 of shape (blocks, BLOCK), on the
        same device."""
