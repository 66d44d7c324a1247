"""What the script reads from tensors: recorded, so that a replay, whose tensors mean nothing, gives it the same."""

from __future__ import annotations

import functools
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dadt.errors import ConfigError

SMALL = 64
"""Elements of the largest tensor whose contents are recorded."""
_READERS = ("item", "__float__", "__int__", "__bool__", "__index__", "tolist", "numpy")


class Values:
    """One after the other, in the order in which the thread that trains has read them.

    Only what the script itself reads counts, or a library on its behalf: not what happens `aside`, as within forwards,
    which a replay leaves out.
    """

    def __init__(self) -> None:
        self.recorded = bytearray()
        self._at = 0
        """What a replay has given so far."""
        self.replaying = False
        self.unknown = 0
        """Tensors too large to be recorded, which a replay was asked for."""
        self._aside = 0
        self._thread = threading.get_ident()
        self._pid = os.getpid()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, nothing is recorded."""
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    def enter(self) -> None:
        """The same as `aside`, until `leave`."""
        self._aside += 1

    def leave(self) -> None:
        self._aside -= 1

    @property
    def given(self) -> int:
        """Bytes of what was recorded that a replay has given."""
        return self._at

    def as_tensor(self) -> torch.Tensor:
        """What was recorded so far. uint8, (bytes,)."""
        if not self.recorded:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(bytearray(self.recorded), dtype=torch.uint8)

    def install(self) -> None:
        for name in _READERS:
            setattr(torch.Tensor, name, self._reading(getattr(torch.Tensor, name)))

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            elsewhere = threading.get_ident() != self._thread or os.getpid() != self._pid
            if self._aside or elsewhere or sys._getframe(1).f_globals["__name__"].startswith("dadt."):
                return original(tensor, *args, **kwargs)
            with self.aside():  # torch's own may call each other
                if self.replaying:
                    return original(self._known(tensor), *args, **kwargs)
                self._record(tensor)
                return original(tensor, *args, **kwargs)

        return read

    def _record(self, tensor: torch.Tensor) -> None:
        if 0 < tensor.numel() <= SMALL:
            content = _bytes(tensor)
            self.recorded += _head(tensor, len(content)) + content

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        """With the contents that the tensor in its place had."""
        if not 0 < tensor.numel() <= SMALL:
            self.unknown += tensor.numel() > SMALL
            return tensor
        head = _head(tensor, tensor.numel() * tensor.element_size())
        end = self._at + len(head) + tensor.numel() * tensor.element_size()
        if self.recorded[self._at : self._at + len(head)] != head or end > len(self.recorded):
            raise ConfigError("the script reads other values from tensors than it has read before")
        content = self.recorded[self._at + len(head) : end]
        self._at = end
        with torch.no_grad():
            return torch.frombuffer(content, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


def _head(tensor: torch.Tensor, size: int) -> bytes:
    return struct.pack("<BH", len(str(tensor.dtype)), size)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes()
