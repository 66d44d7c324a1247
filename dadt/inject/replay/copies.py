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


class Room:
    """Memory for copies, kept from one snapshot to the next: to be given new memory costs more than to copy."""

    def __init__(self) -> None:
        self._free: dict[Any, list[torch.Tensor]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        free = self._free.get(_kind(like))
        return free.pop() if free else torch.empty_like(like, device="cpu", requires_grad=False)

    def give_back(self, copies: list[torch.Tensor]) -> None:
        """Those that are needed no more; what none of them was taken for is let go."""
        self._free = {}
        for each in copies:
            self._free.setdefault(_kind(each), []).append(each)


class Copies:
    """Of one snapshot."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._copied: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Each tensor and its copy, by the tensor's id."""
        self._later: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        """What the other thread copies, into what, and its version then."""
        self._kept: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None

    def now(self, content: Any) -> Any:
        """The same with copies in place of all tensors."""
        return tree_map_only(torch.Tensor, self._now, content)

    def later(self, content: Any) -> Any:
        """The same, where copies are good once `finish` has returned."""
        return tree_map_only(torch.Tensor, self._let, content)

    def begin(self) -> None:
        """Copy what is left to another thread."""
        if self._later:
            self._thread = threading.Thread(target=self._work, name="dadt-copies", daemon=True)
            self._thread.start()

    def finish(self) -> bool:
        """Wait until all is copied. Whether it is as it was: nothing has changed it meanwhile."""
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
    """Without holes: it lies in as much memory as it has values, as a copy does, in the same order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _kind(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride() if _is_dense(tensor) else None, tensor.dtype
