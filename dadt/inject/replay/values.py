"""Records the values that the script reads from tensors, so that they are returned again in a replay, whose tensors
contain no real values."""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dadt.comm.shards import whole
from dadt.errors import NotResumed
from dadt.inject.optimizer import is_caller
from dadt.inject.patch import replaces

SMALL = 64
"""Number of elements of the largest tensor whose values are recorded."""
_COUNT = struct.Struct("<BHQ")
_READERS = ("item", "__float__", "__int__", "__bool__", "__index__", "tolist", "numpy")


class ReadValues:
    """The values that the script has read from tensors, in the order in which the training thread has read them.

    Only reads by the script itself, or by a library that it has called, count. Reads in an `aside` context do not, such
    as those within forwards, which a replay skips.
    """

    def __init__(self) -> None:
        self.recorded = bytearray()
        self.given = 0
        """Number of bytes of `recorded` that a replay has passed to the script so far."""
        self.replaying = False
        self.unknown = 0
        """Number of reads, during a replay, of tensors that were too large to be recorded, so that the script got other
        values than before."""
        self._aside = 0
        self._stopped = False
        self._steps: list[FrameType] = []
        """Frames in which an optimizer's step was called. Some of these steps may have ended with an error."""
        self._thread = threading.get_ident()
        self._pid = os.getpid()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which the script's thread can read values without recording them. Reads of other threads are
        never recorded."""
        mine = threading.get_ident() == self._thread
        self._aside += mine
        try:
            yield
        finally:
            self._aside -= mine

    def stop(self) -> None:
        """Record no more values, because no replay will need them."""
        self.recorded.clear()
        self._stopped = True

    def step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Pre-hook of optimizers' steps: reads within a step are not recorded."""
        self._in_step()
        self._steps.append(sys._getframe(1))

    @property
    def in_step(self) -> bool:
        """Whether an optimizer's step is under way."""
        return self._in_step()

    def _in_step(self) -> bool:
        """Return whether an optimizer's step is in progress; called on the script's thread. Removes steps that have
        raised an error, whose end no hook reports, because their frames are no longer among the callers."""
        while self._steps and not is_caller(self._steps[-1], sys._getframe()):
            self._steps.pop()
        return len(self._steps) > 0

    def as_tensor(self) -> torch.Tensor:
        """Return what was recorded so far, as a one-dimensional tensor of uint8."""
        if not self.recorded:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(bytearray(self.recorded), dtype=torch.uint8)

    def install(self) -> None:
        for name in _READERS:
            self._patch_reader(name)
        self._patch_load()

        @replaces("__repr__", torch.Tensor)
        def show(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with self.aside():  # how often torch reads values while it prints a tensor depends on the values
                return show.__wrapped__(tensor, *args, **kwargs)

    def _patch_reader(self, name: str) -> None:
        @replaces(name, torch.Tensor)
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._aside or self.is_elsewhere(sys._getframe(1)) or self._in_step():
                return read.__wrapped__(tensor, *args, **kwargs)
            with self.aside():  # torch's own methods for reading may call each other
                tensor = whole(tensor)
                if self.replaying:
                    return read.__wrapped__(self._known(tensor), *args, **kwargs)
                self._record(tensor)
                return read.__wrapped__(tensor, *args, **kwargs)

    def told(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a value that DADT passes to the script, as if the script had read it; in a replay, return the earlier
        value."""
        if self.replaying:
            return self._known(tensor)
        self._record(tensor)
        return tensor

    def _patch_load(self) -> None:
        """Patch torch.load so that numbers and text in a file are recorded like values read from tensors: in a replay,
        the file may be a newer one, and torch.load raises NotResumed if these values differ."""

        @replaces("load", torch, torch.serialization)
        def load(*args: Any, **kwargs: Any) -> Any:
            if self._aside or self.is_elsewhere(sys._getframe(1)) or self._in_step():
                return load.__wrapped__(*args, **kwargs)
            with self.aside():
                content = load.__wrapped__(*args, **kwargs)
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

    def note(self, data: bytes) -> None:
        """Record other data in sequence with the values that the script reads."""
        if not self._stopped:
            self.recorded += struct.pack("<BH", 0, len(data)) + data

    def noted(self) -> bytes:
        """Return, in a replay, the data recorded by `note` at this point. Raises NotResumed if there is none."""
        kind, size = struct.unpack_from("<BH", self.recorded, self.given) if self._has(3) else (1, 0)
        if kind or not self._has(3 + size):
            raise NotResumed("the script draws random numbers for its data at another place than before")
        begin = self.given + 3
        self.given = begin + size
        return bytes(self.recorded[begin : self.given])

    def _has(self, size: int) -> bool:
        return self.given + size <= len(self.recorded)

    def is_elsewhere(self, caller: FrameType) -> bool:
        """Return whether the caller is DADT's own code, or runs in another thread or process than the script."""
        ours = caller.f_globals.get("__name__", "").startswith("dadt.")
        return ours or threading.get_ident() != self._thread or os.getpid() != self._pid

    def heeds(self) -> bool:
        """Return whether the script, or a library that it has called, has called the function two frames above, so that
        its reads are recorded."""
        if self._aside or threading.get_ident() != self._thread or self._in_step():
            return False
        return not self.is_elsewhere(sys._getframe(2))

    def counted(self, count: int, most: int) -> int:
        """Record how many elements an operation has selected by the values of tensors, and return that number; in a
        replay, return the recorded number. most: largest plausible number. Raises NotResumed if the record does not
        fit."""
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
        """Return a tensor with the values that were recorded at this point of the script. Raises NotResumed if the
        record does not fit."""
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
