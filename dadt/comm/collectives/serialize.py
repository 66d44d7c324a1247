"""Packs a tensor into bytes that include its dtype and shape, for receivers that know neither."""

from __future__ import annotations

import json
import struct
from typing import Any

import torch

from dadt.comm.collectives.operation import host_copy

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's dtype, shape and values as one flat byte tensor in host memory. Raises TypeError for a sparse
    tensor."""
    host = host_copy(tensor)
    head = json.dumps([str(host.dtype).removeprefix("torch."), list(host.shape)]).encode()
    data = -(-(_LENGTH.size + len(head)) // _ALIGNMENT) * _ALIGNMENT
    packed = torch.zeros(data + host.nbytes, dtype=torch.uint8, device="cpu")
    packed[: _LENGTH.size + len(head)] = torch.frombuffer(bytearray(_LENGTH.pack(len(head)) + head), dtype=torch.uint8)
    if host.numel():
        packed[data:] = host.reshape(-1).view(torch.uint8)
    return packed


def unpack(memory: Any) -> torch.Tensor:
    """Return the tensor packed in `memory`, without copying the values."""
    (length,) = _LENGTH.unpack_from(memory)
    name, shape = json.loads(bytes(memoryview(memory)[_LENGTH.size : _LENGTH.size + length]))
    dtype = getattr(torch, name)
    data = -(-(_LENGTH.size + length) // _ALIGNMENT) * _ALIGNMENT
    if memoryview(memory).nbytes == data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, offset=data).view(shape)
