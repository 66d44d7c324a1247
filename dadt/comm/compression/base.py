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


def in_blocks(values: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the float32 values as `blocks` blocks. A block that is only partly filled repeats its values, which leaves
    its mean and largest magnitude unchanged; blocks after it are zero."""
    total = values.numel()
    filled = torch.zeros(blocks * BLOCK, device=values.device, dtype=torch.float32)
    filled[:total] = values
    if rest := total % BLOCK:
        last = values[total - rest :]
        filled[total : total - rest + BLOCK] = last.repeat(-(-BLOCK // rest))[: BLOCK - rest]
    return filled.view(blocks, BLOCK)


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
