"""How many tensors have the same memory."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_uint32

import torch

_COUNT = 8
"""Behind its table of virtual functions, a storage holds how often it is referred to, in the lower half of a word."""


def _read(storage: int) -> int:
    return c_uint32.from_address(storage + _COUNT).value


storage_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", _read)
"""storage_uses(tensor.untyped_storage()._cdata). Older builds of torch for the CPU have no such function."""
