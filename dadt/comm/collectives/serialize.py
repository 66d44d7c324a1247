"""A tensor as bytes that tell its dtype and shape: for ranks that do not know what they are sent."""

from __future__ import annotations

import json
import struct
from typing import Any

import torch

from dadt.comm.collectives.operation import host_copy

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """One flat tensor of bytes, in memory of the host. Raises TypeError for a sparse one."""
    host = host_copy(tensor)
    head = json.dumps([str(host.dtype).removeprefix("torch."), list(host.shape)]).encode()
    data = -(-(_LENGTH.size + len(head)) // _ALIGNMENT) * _ALIGNMENT
    packed = torch.zeros(data + host.numel() * host.element_size(), dtype=torch.uint8, device="cpu")
    packed[: _LENGTH.size + len(head)] = torch.frombuffer(bytearray(_LENGTH.pack(len(head)) + head), dtype=torch.uint8)
    if host.numel():
        packed[data:] = host.reshape(-1).view(torch.uint8)
    return packed


def unpack(memory: Any) -> torch.Tensor:
    """The tensor, in the memory that was received."""
    (length,) = _LENGTH.unpack_from(memory)
    name, shape = json.loads(bytes(memoryview(memory)[_LENGTH.size : _LENGTH.size + length]))
    dtype = getattr(torch, name)
    data = -(-(_LENGTH.size + length) // _ALIGNMENT) * _ALIGNMENT
    if memoryview(memory).nbytes == data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, offset=data).view(shape)
