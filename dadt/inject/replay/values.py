"""What the script reads from tensors: recorded, so that a replay, whose tensors mean nothing, gives it the same."""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dadt.errors import NotResumed
from dadt.inject.optimizer import is_caller

SMALL = 64
"""Elements of the largest tensor whose contents are recorded."""
_COUNT = struct.Struct("<BHQ")
_READERS = ("item", "__float__", "__int__", "__bool__", "__index__", "tolist", "numpy")


class ReadValues:
    """The values that the script has read from tensors, in the order in which the thread that trains has read them.

    Only what the script itself reads counts, or a library on its behalf: not what happens `aside`, as within forwards,
    which a replay leaves out.
    """

    def __init__(self) -> None:
        self.recorded = bytearray()
        self.given = 0
        """Bytes of `recorded` that a replay has given to the script so far."""
        self.replaying = False
        self.unknown = 0
        """Tensors too large to be recorded, which a replay was asked for."""
        self._aside = 0
        self._stopped = False
        self._steps: list[FrameType] = []
        """Calls of an optimizer's step that may be under way."""
        self._thread = threading.get_ident()
        self._pid = os.getpid()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which nothing is recorded. Another thread's reads are not recorded anyway."""
        mine = threading.get_ident() == self._thread
        self._aside += mine
        try:
            yield
        finally:
            self._aside -= mine

    def stop(self) -> None:
        """Record nothing any more, as nobody will ask for the values."""
        self.recorded.clear()
        self._stopped = True

    def step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A hook of torch's: an optimizer's step is aside, too."""
        self._in_step()
        self._steps.append(sys._getframe(1))

    @property
    def in_step(self) -> bool:
        """Whether an optimizer's step is under way."""
        return self._in_step()

    def _in_step(self) -> bool:
        """A step that has raised is over, and no hook says so."""
        while self._steps and not is_caller(self._steps[-1], sys._getframe()):
            self._steps.pop()
        return len(self._steps) > 0

    def as_tensor(self) -> torch.Tensor:
        """What was recorded so far, as a tensor of uint8 of one dimension."""
        if not self.recorded:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(bytearray(self.recorded), dtype=torch.uint8)

    def install(self) -> None:
        for name in _READERS:
            setattr(torch.Tensor, name, self._reading(getattr(torch.Tensor, name)))
        torch.load = torch.serialization.load = self._loading(torch.load)
        shown: Callable[..., str] = torch.Tensor.__repr__

        @functools.wraps(shown)
        def __repr__(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
            with self.aside():  # how often it reads depends on the values
                return shown(tensor, *args, **kwargs)

        setattr(torch.Tensor, "__repr__", __repr__)  # noqa: B010

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._aside or self._in_step() or self.is_elsewhere(sys._getframe(1)):
                return original(tensor, *args, **kwargs)
            with self.aside():  # torch's own may call each other
                if self.replaying:
                    return original(self._known(tensor), *args, **kwargs)
                self._record(tensor)
                return original(tensor, *args, **kwargs)

        return read

    def told(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a value that DADT gives the script, as if the script had read it; in a replay, return the earlier
        value."""
        if self.replaying:
            return self._known(tensor)
        self._record(tensor)
        return tensor

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Numbers and words of a file count as read: a replay may find a later one in its place."""

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            if self._aside or self._in_step() or self.is_elsewhere(sys._getframe(1)):
                return original(*args, **kwargs)
            with self.aside():
                content = original(*args, **kwargs)
            plain = [each for each in tree_leaves(content) if isinstance(each, int | float | str)]
            told = hashlib.sha256(repr(plain).encode()).digest()
            told = struct.pack("<BH", 0, len(told)) + told
            if not self.replaying:
                self.recorded += b"" if self._stopped else told
            elif self.recorded[self.given : self.given + len(told)] == told:
                self.given += len(told)
            else:
                raise NotResumed("the script loads another file than it has loaded before")
            return content

        return load

    def note(self, data: bytes) -> None:
        """Record something beside what is read."""
        if not self._stopped:
            self.recorded += struct.pack("<BH", 0, len(data)) + data

    def noted(self) -> bytes:
        """What was recorded so, in a replay. Raises NotResumed."""
        kind, size = struct.unpack_from("<BH", self.recorded, self.given) if self._has(3) else (1, 0)
        if kind or not self._has(3 + size):
            raise NotResumed("the script draws random numbers for its data at another place than before")
        begin = self.given + 3
        self.given = begin + size
        return bytes(self.recorded[begin : self.given])

    def _has(self, size: int) -> bool:
        return self.given + size <= len(self.recorded)

    def is_elsewhere(self, caller: FrameType) -> bool:
        """It is not the script's thread that calls, or DADT does."""
        ours = caller.f_globals.get("__name__", "").startswith("dadt.")
        return ours or threading.get_ident() != self._thread or os.getpid() != self._pid

    def heeds(self) -> bool:
        """Whether it is the script that calls, two calls above, or a library on its behalf."""
        if self._aside or threading.get_ident() != self._thread or self._in_step():
            return False
        return not self.is_elsewhere(sys._getframe(2))

    def counted(self, count: int, most: int) -> int:
        """How many elements were selected by values: recorded, or, in a replay, how many these were. Raises
        NotResumed."""
        if not self.replaying:
            self.recorded += b"" if self._stopped else _COUNT.pack(1, 8, count)
            return count
        known = _COUNT.unpack_from(self.recorded, self.given) if self._has(_COUNT.size) else (0, 0, 0)
        if known[:2] != (1, 8) or known[2] > most:
            raise NotResumed("the script selects elements of tensors by their values at another place than before")
        self.given += _COUNT.size
        return int(known[2])

    def _record(self, tensor: torch.Tensor) -> None:
        if 0 < tensor.numel() <= SMALL and not self._stopped:
            content = _bytes(tensor)
            self.recorded += _head(tensor, len(content)) + content

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        """With the contents that the tensor in its place had."""
        if not 0 < tensor.numel() <= SMALL:
            self.unknown += tensor.numel() > SMALL
            return tensor
        head = _head(tensor, tensor.numel() * tensor.element_size())
        end = self.given + len(head) + tensor.numel() * tensor.element_size()
        if self.recorded[self.given : self.given + len(head)] != head or end > len(self.recorded):
            raise NotResumed("the script reads other values from tensors than it has read before")
        content = self.recorded[self.given + len(head) : end]
        self.given = end
        with torch.no_grad():
            return torch.frombuffer(content, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


def _head(tensor: torch.Tensor, size: int) -> bytes:
    return struct.pack("<BH", len(str(tensor.dtype)), size)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes()
