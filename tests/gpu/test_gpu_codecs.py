"""A GPU's operations compress to the same bytes as the core."""

from __future__ import annotations

import pytest
import torch

from dadt import _core
from dadt.comm.compression import CODECS, OF_MOMENTUM
from dadt.comm.compression.base import BLOCK

pytestmark = pytest.mark.gpu
BLOCKS = 40
EVERY = {**CODECS, **OF_MOMENTUM}


def values() -> torch.Tensor:
    """Blocks of all magnitudes, of the smallest and the largest, and some that are no numbers."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randn(BLOCKS, BLOCK, generator=generator) * 10.0 ** torch.linspace(-42, 37, BLOCKS).unsqueeze(1)
    blocks[3, ::3] = 0.0
    blocks[7, ::2] = -0.0
    blocks[-1, 5] = torch.finfo(torch.float32).max
    return blocks


@pytest.mark.parametrize("name", EVERY)
def test_the_same_bytes(name: str) -> None:
    codec, blocks = EVERY[name], values()
    wire = torch.empty(BLOCKS, codec.core.block_bytes, dtype=torch.uint8)
    _core.compress(codec.core, blocks.data_ptr(), blocks.numel(), wire.data_ptr(), 0, 0.0)
    assert torch.equal(codec.encode(blocks.cuda()).cpu(), wire)
    back = torch.empty_like(blocks)
    _core.decompress(codec.core, wire.data_ptr(), back.data_ptr(), back.numel())
    assert torch.equal(codec.decode(wire.cuda()).cpu().view(torch.int32), back.view(torch.int32))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_stays_none(name: str, odd: float) -> None:
    codec, blocks = EVERY[name], torch.randn(4, BLOCK, device="cuda")
    blocks[2, 9] = odd
    back = codec.decode(codec.encode(blocks))
    assert not back[2, 9].isfinite() and back[[0, 1, 3]].isfinite().all()
