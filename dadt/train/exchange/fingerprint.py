"""crc32 fingerprints of some values of tensors, by which ranks find out whether their tensors are equal."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dadt.comm import shards
from dadt.comm.shards import local

_TRAINED = 4
_GRADIENTS = 8
"""Number of gradients in a fingerprint, from the last parameters. One is not enough, because the gradient of a last
bias may be the same for any data (with a summed loss it is the batch size)."""
_INPUTS = 4096
"""Maximum number of values of each input in a fingerprint. It suffices for all values of a batch of tokens, and for
some values of each image in a batch."""


def of_gradient(parameters: Sequence[torch.Tensor]) -> int:
    """Return a fingerprint of the last parameters' gradients; 0 if all their values are 0 or there is no gradient."""
    dense = [g for g in shards.gradients(parameters) if g is not None and is_dense(g)][-_GRADIENTS:]
    return _crc(dense) if any(bool(some_values(gradient).any()) for gradient in dense) else 0


def of_inputs(given: Any, before: int) -> int:
    """Return a fingerprint of the data tensors among a forward's inputs. before: fingerprint of earlier forwards of the
    step, which is included."""
    leaves = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor) and not t.requires_grad and is_dense(t)]
    return zlib.crc32(_bytes([_spread(t) for t in leaves], _INPUTS), before) if leaves else before


def of_trained(parameters: Sequence[torch.Tensor], number: int) -> int:
    """Return a fingerprint of a few parameters, which `number` selects. Parameters on a GPU are left out, as the host
    would have to wait for their values."""
    here = [p for p in parameters if p.device.type == "cpu" and is_dense(p)]
    begin = _TRAINED * number % len(here) if here else 0
    return _crc([*here[begin:], *here[:begin]][:_TRAINED])


def of_untrained(modules: Iterable[nn.Module], trained: Iterable[torch.Tensor]) -> int:
    """Return a fingerprint of the modules' parameters that require no gradient, except parameters in `trained`, which
    some optimizer trains and which are frozen only temporarily."""
    left_out = {id(p) for p in trained}
    every = {id(p): p for m in modules for p in m._parameters.values() if p is not None and id(p) not in left_out}
    return _crc([p for p in every.values() if not p.requires_grad and is_dense(p)])


def of_values(values: torch.Tensor) -> int:
    """Return the crc32 of all values of a small tensor."""
    return zlib.crc32(_bytes([values], values.numel()))


def _crc(tensors: Sequence[torch.Tensor]) -> int:
    return zlib.crc32(_bytes(tensors))


def _bytes(tensors: Sequence[torch.Tensor], most: int = 64) -> bytes:
    layout = torch.contiguous_format  # view() would reject the stride that a tensor with one value may have
    parts = [some_values(t, most).to("cpu", copy=True, memory_format=layout).view(torch.uint8) for t in tensors]
    return b"".join(part.numpy().tobytes() for part in parts)


def some_values(tensor: torch.Tensor, most: int = 64) -> torch.Tensor:
    """Return the tensor's first values, at most `most`, on the tensor's own device."""
    return local(tensor).detach().reshape(-1)[:most]


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return values from the whole tensor, an odd number of elements apart, because an even distance could select the
    same positions in every image."""
    tensor = local(tensor)
    return tensor.reshape(-1)[:: -(-tensor.numel() // _INPUTS) | 1]


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta" and local(tensor).numel() > 0
