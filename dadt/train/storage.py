"""Reference counts of the memory that tensors share."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_uint32

import torch

_COUNT = 8
"""Byte offset of the reference count in a torch storage object: the lower half of the word after the virtual function
table's pointer."""


def _read(storage: int) -> int:
    return c_uint32.from_address(storage + _COUNT).value


storage_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", _read)
"""Returns the reference count of a storage: storage_uses(tensor.untyped_storage()._cdata). Older CPU builds of torch
lack the function, so the count is read from memory."""
