"""16-bit floats, rounded to nearest; what is too large is sent as the largest."""

from __future__ import annotations

import torch

from dadt import _core


class Short:
    """The codec that sends each value as a bfloat16 or float16."""

    def __init__(self, core: _core.Codec, dtype: torch.dtype) -> None:
        self.core = core
        self._dtype = dtype
        self._largest = torch.finfo(dtype).max

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        # Among values that are no numbers nothing is worth saving: infinity stays infinity.
        finite = values.isfinite().all(1, keepdim=True)
        limited = torch.where(finite, values.clamp(-self._largest, self._largest), values)
        return limited.to(self._dtype).view(torch.uint8)

    def decode(self, wire: torch.Tensor) -> torch.Tensor:
        return wire.view(self._dtype).to(torch.float32)


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded once; what is finite stays so, in 16 bits as well."""
    most = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-most, most), values).to(dtype)


BFLOAT16 = Short(_core.Codec.bf16, torch.bfloat16)
FLOAT16 = Short(_core.Codec.fp16, torch.float16)
