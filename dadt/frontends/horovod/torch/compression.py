"""Horovod's compression of tensors for a reduction, which runs in the thread of the caller. DADT's own compression is
chosen by `--compression`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Compressor:
    """Base class of compressors, which make a tensor smaller before it is sent. This one leaves it as it is."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context that `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the received tensor in the form that it had before `compress`."""
        return tensor


class NoneCompressor(Compressor):
    """Sends tensors as they are."""


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor, as float16 if it is floating-point, and its dtype before."""
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in the dtype that it had before `compress`."""
        return tensor.to(ctx)


class Compression:
    """The compressors that scripts choose from, such as `hvd.Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
