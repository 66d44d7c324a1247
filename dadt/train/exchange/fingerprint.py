"""crc32 of some values of tensors, by which ranks see whether they have the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_TRAINED = 4
_GRADIENTS = 8
"""How many gradients are looked at, the last ones. That of a last bias alone may be the same for any data: with a loss
that is a sum it is the size of the batch."""
_INPUTS = 4096
"""Values of each input: all that a batch of tokens has, and of a batch of images some of each row."""


def of_gradient(parameters: Sequence[torch.Tensor]) -> int:
    """Fingerprint of the last gradients; 0 if all their values are 0, or there is none."""
    dense = [p.grad for p in parameters if p.grad is not None and _is_dense(p.grad)][-_GRADIENTS:]
    return _crc(dense) if any(bool(some_values(gradient).any()) for gradient in dense) else 0


def of_inputs(given: Any, before: int) -> int:
    """Fingerprint of the data in what a forward is given, and of `before`, that of earlier forwards of the step."""
    leaves = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor) and not t.requires_grad and _is_dense(t)]
    return zlib.crc32(_bytes([_spread(t) for t in leaves], _INPUTS), before) if leaves else before


def of_trained(parameters: Sequence[torch.Tensor], number: int) -> int:
    """Fingerprint of a few parameters, the next ones for the next number. Those on a GPU do not count: the host would
    wait for them."""
    here = [p for p in parameters if p.device.type == "cpu" and _is_dense(p)]
    begin = _TRAINED * number % len(here) if here else 0
    return _crc([*here[begin:], *here[:begin]][:_TRAINED])


def of_untrained(modules: Iterable[nn.Module], trained: Iterable[torch.Tensor]) -> int:
    """Fingerprint of the modules' parameters that need no gradient, without trained ones that are frozen for now."""
    left_out = {id(p) for p in trained}
    every = {id(p): p for m in modules for p in m._parameters.values() if p is not None and id(p) not in left_out}
    return _crc([p for p in every.values() if not p.requires_grad and _is_dense(p)])


def of_values(values: torch.Tensor) -> int:
    """crc32 of all values of a small tensor."""
    return zlib.crc32(_bytes([values], values.numel()))


def _crc(tensors: Sequence[torch.Tensor]) -> int:
    return zlib.crc32(_bytes(tensors))


def _bytes(tensors: Sequence[torch.Tensor], most: int = 64) -> bytes:
    layout = torch.contiguous_format  # else a single value keeps its stride
    parts = [some_values(t, most).to("cpu", copy=True, memory_format=layout).view(torch.uint8) for t in tensors]
    return b"".join(part.numpy().tobytes() for part in parts)


def some_values(tensor: torch.Tensor, most: int = 64) -> torch.Tensor:
    """The tensor's first values, at most `most`, on its own device."""
    return tensor.detach().reshape(-1)[:most]


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Values from all over the tensor, whose distance is odd: an even one meets the same corner of every image."""
    return tensor.reshape(-1)[:: -(-tensor.numel() // _INPUTS) | 1]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel() > 0
