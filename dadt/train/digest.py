"""A 64-bit digest of all bytes of a tensor, by which ranks find out whether their tensors are equal without sending
them.

The bytes are read as 64-bit integers, and each is multiplied by an odd number that depends on its position before all
are added up, so that the digest differs if any value changes or two values swap places. Equal tensors have equal
digests on every device, as integers are added exactly. The digest does not protect against an attacker who constructs
tensors with a given digest.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cache

import torch

from dadt.comm.shards import local

_ROW = 1 << 16
"""Number of 64-bit integers that are multiplied at once on a CPU: few enough for a processor's cache."""
_ROWS = 256
"""Number of rows of _ROW integers that are multiplied at once on a device other than a CPU."""
_ALL = (1 << 64) - 1


@torch.no_grad()
def digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a digest of each tensor's bytes, shape and dtype. For a sharded tensor, only the part on this rank counts.
    Needs up to 128 MiB for copies, and a copy of each tensor that is not contiguous. Waits for a GPU only after all its
    work is launched."""
    every = [local(t).detach() for t in tensors]
    sums = [_sum(as_bytes(t)) for t in every]
    return [int(s) + zlib.crc32(f"{t.dtype}{tuple(t.shape)}".encode()) & _ALL for s, t in zip(sums, every, strict=True)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor's values, in the order of its dimensions. The result shares the tensor's
    memory if the tensor is contiguous."""
    tensor = tensor.resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().reshape(-1).view(torch.uint8)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return the digest of these bytes, on their device: the sum of all 64-bit integers, each times the factor that
    belongs to its position."""
    if len(values) % 8 or values.storage_offset() % 8:
        values = torch.cat([values, values.new_zeros(-len(values) % 8)])
    numbers = values.view(torch.int64)
    weights = _weights(numbers.device)
    piece = _ROW if numbers.device.type == "cpu" else _ROW * _ROWS
    while True:
        numbers = torch.cat([_sums_of_rows(part, weights) for part in torch.split(numbers, piece)])
        if len(numbers) == 1:
            return numbers[0]


def _sums_of_rows(numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return, for each row of `_ROW` integers, the sum of the integers times their weights. The last row may be
    shorter."""
    # The upper half is added to the lower half, since multiplication modulo 2**64 carries a change of the highest bit
    # to no other bit.
    mixed = (numbers >> 32).add_(numbers)
    whole = len(mixed) // _ROW * _ROW
    rest = mixed[whole:].mul_(weights[: len(mixed) - whole]).sum(0, keepdim=True)
    sums = mixed[:whole].view(-1, _ROW).mul_(weights).sum(1) if whole else rest[:0]
    return torch.cat([sums, rest]) if whole < len(mixed) or not whole else sums


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return an odd number for each position of a row, which look random but are always the same (SplitMix64)."""
    mixed = torch.arange(1, _ROW + 1, dtype=torch.int64, device="cpu") * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return ((mixed ^ (mixed >> 31)) | 1).to(device)
