"""Reads the reference counts of tensors' storages."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_uint32

import torch

_COUNT = 8
"""Byte offset of the 32-bit reference count in a torch storage object. It is the lower half of the 64-bit word after
the pointer to the virtual function table."""


def _read(storage: int) -> int:
    return c_uint32.from_address(storage + _COUNT).value


storage_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", _read)
"""Returns the reference count of a storage: storage_uses(tensor.untyped_storage()._cdata). Older CPU builds of torch
lack the function, so the count is read from memory."""
