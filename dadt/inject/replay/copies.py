"""Copies tensors to host memory, with as little work as possible on the training thread.

Tensors that a script may change right after a step, such as weights that it clips, are copied by the training thread.
Tensors that do not change before the next step (an optimizer's state, gradients that were sent) are copied by another
thread while the script computes the next gradients. The next step waits until all copies are made.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from dadt.comm.shards import local

LARGE = 1 << 20
"""Size in bytes from which a tensor may be copied by another thread, and from which the memory of its copy is reused
for the next snapshot."""


class CopyMemory:
    """Memory for copies, reused from one snapshot to the next, since allocating it costs more than copying."""

    def __init__(self) -> None:
        self._free: dict[Any, list[torch.Tensor]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        free = self._free.get(_kind(like))
        return free.pop() if free else torch.empty_like(like, device="cpu", requires_grad=False)

    def give_back(self, copies: list[torch.Tensor]) -> None:
        """Take back the memory of copies that are no longer needed, for use by the next snapshot. Memory taken back
        earlier and not used since is freed."""
        self._free = {}
        for each in copies:
            self._free.setdefault(_kind(each), []).append(each)


class Copies:
    """The copies of all tensors in one snapshot."""

    def __init__(self, room: CopyMemory) -> None:
        self._room = room
        self._copied: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Each tensor and its copy, by the tensor's id."""
        self._later: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        """The tensors that the other thread copies, each with its copy and the tensor's version counter at the time of
        the snapshot."""
        self._kept: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None

    def now(self, content: Any) -> Any:
        """Return the content with all its tensors replaced by copies, which contain the values already."""
        return tree_map_only(torch.Tensor, self._now, content)

    def later(self, content: Any) -> Any:
        """Return the content with all its tensors replaced by copies, which contain the values only after `finish` has
        returned."""
        return tree_map_only(torch.Tensor, self._let, content)

    def begin(self) -> None:
        """Start the thread that makes the copies requested by `later`."""
        if self._later:
            self._thread = threading.Thread(target=self._work, name="dadt-copies", daemon=True)
            self._thread.start()

    def finish(self) -> bool:
        """Wait until everything is copied. Return whether the copies are valid, because no tensor has changed since the
        snapshot."""
        if self._thread is not None:
            self._thread.join()
        return all(source._version == version for source, _, version in self._later)

    def over(self) -> None:
        """Release the copies and reuse their memory for the next snapshot."""
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
        part = local(tensor)
        if id(part) not in self._copied:
            self._copied[id(part)] = part, make(part)
        return self._copied[id(part)][1]

    def _work(self) -> None:
        for source, into, _ in self._later:
            # Not torch's copy_, which would start another pool of threads, as large as the one that the script uses.
            ctypes.memmove(into.data_ptr(), source.data_ptr(), source.nbytes)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.nbytes >= LARGE


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory has no gaps, and a copy made by torch would have its values in the same
    order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _kind(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride() if _is_dense(tensor) else None, tensor.dtype
