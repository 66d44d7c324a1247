"""Copies of tensors on the host, of which the thread that trains makes as few as it can.

What a script may change at once behind a step, as weights that it clips, is copied there. What only the next step
changes (an optimizer's state, gradients that were sent) another thread copies while the script computes the gradients
of that step, which waits for what is left of it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

LARGE = 1 << 20
"""Bytes of a tensor whose copy is worth another thread, and memory that is kept for the next one."""


class CopyMemory:
    """Memory for copies, kept from one snapshot to the next, as allocating it costs more than copying."""

    def __init__(self) -> None:
        self._free: dict[Any, list[torch.Tensor]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        free = self._free.get(_kind(like))
        return free.pop() if free else torch.empty_like(like, device="cpu", requires_grad=False)

    def give_back(self, copies: list[torch.Tensor]) -> None:
        """Keep this memory, needed no longer, for the next snapshot. Memory that was kept before and not taken since is
        freed."""
        self._free = {}
        for each in copies:
            self._free.setdefault(_kind(each), []).append(each)


class Copies:
    """The copies of the tensors of one snapshot."""

    def __init__(self, room: CopyMemory) -> None:
        self._room = room
        self._copied: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Each tensor and its copy, by the tensor's id."""
        self._later: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        """The tensors that the other thread copies, each with its copy and with its version when it was noted."""
        self._kept: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None

    def now(self, content: Any) -> Any:
        """The content with copies in place of all its tensors."""
        return tree_map_only(torch.Tensor, self._now, content)

    def later(self, content: Any) -> Any:
        """The content with copies in place of all its tensors; they hold the values once `finish` has returned."""
        return tree_map_only(torch.Tensor, self._let, content)

    def begin(self) -> None:
        """Start the thread that makes the copies that `later` has left."""
        if self._later:
            self._thread = threading.Thread(target=self._work, name="dadt-copies", daemon=True)
            self._thread.start()

    def finish(self) -> bool:
        """Wait until all is copied. Returns whether the copies are good: no tensor has changed since it was noted."""
        if self._thread is not None:
            self._thread.join()
        return all(source._version == version for source, _, version in self._later)

    def over(self) -> None:
        """The copies are needed no more."""
        self._room.give_back(self._kept)
        self._kept, self._later = [], []
        self._copied.clear()

    def _now(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._copy(tensor, lambda t: self._filled(t.detach()))

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_large(tensor):
            return tensor.to("cpu", copy=True)
        self._kept.append(self._room.take(tensor))
        return self._kept[-1].copy_(tensor)

    def _let(self, tensor: torch.Tensor) -> torch.Tensor:
        def placed(tensor: torch.Tensor) -> torch.Tensor:
            plain = tensor.is_cpu and not tensor.is_inference() and not tensor.is_conj() and not tensor.is_neg()
            if not (plain and _is_large(tensor) and _is_dense(tensor)):
                return self._filled(tensor.detach())
            self._kept.append(self._room.take(tensor))
            self._later.append((tensor, self._kept[-1], tensor._version))
            return self._kept[-1]

        return self._copy(tensor, placed)

    def _copy(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if id(tensor) not in self._copied:
            self._copied[id(tensor)] = tensor, make(tensor)
        return self._copied[id(tensor)][1]

    def _work(self) -> None:
        for source, into, _ in self._later:
            # Not torch's, which would start as many threads more as the script has.
            ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel() * source.element_size())


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() * tensor.element_size() >= LARGE


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no holes: it takes as much memory as it has values, in the order of a copy."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _kind(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride() if _is_dense(tensor) else None, tensor.dtype
