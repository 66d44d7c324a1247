"""A snapshot of one rank's weights, with which neighbours average while the live weights are trained."""

from __future__ import annotations

import math
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

PART_BYTES = 1 << 20
"""Bytes of one part of a snapshot. Parts are small, so that another thread waits only briefly for a part's lock and the
arithmetic stays in the CPU cache."""
_ALIGNMENT = 64
_GRAIN = 1 << 14
"""Number of elements up to which torch computes in the calling thread alone. Larger operations would use more threads,
which take processor cores from training."""


class TensorPiece(NamedTuple):
    """A range of one tensor's elements, in the order of the tensor's memory."""

    tensor: int
    start: int
    stop: int


class TensorLayout(NamedTuple):
    """Shape, strides and dtype of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Part:
    """Pieces of tensors of one dtype and device, side by side in the snapshot's contiguous memory from byte `start`
    on."""

    def __init__(self, pieces: Sequence[TensorPiece], dtype: torch.dtype, device: torch.device, start: int) -> None:
        self.pieces = list(pieces)
        self.dtype = dtype
        self.device = device
        self.sizes = [piece.stop - piece.start for piece in pieces]
        self.start = start
        self.stop = start + sum(self.sizes) * dtype.itemsize
        self.lock = threading.Lock()
        self.changed = False
        """Whether this part has differences that the live weights have not received yet. Guarded by `lock`."""

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return this part's range of the contiguous memory `memory`."""
        return memory[self.start : self.stop].view(self.dtype)


class WeightSnapshot:
    """A copy of the weights at the last step boundary, and the sum of the differences added to it since.

    The training thread calls `publish`; meanwhile any other thread may average the copy with a neighbour's. Both ranks
    move by equal numbers with opposite signs, so the sum of weights over all ranks stays constant, however late one of
    them moves.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.parts = _parts(tensors)
        self.bytes = self.parts[-1].stop if self.parts else 0
        self.kinds = [TensorLayout(tuple(t.shape), t.stride(), t.dtype) for t in tensors]
        layout = [(part.pieces, part.start) for part in self.parts]
        self.crc = zlib.crc32(repr((self.kinds, layout)).encode())
        """Checksum of the layout, which is equal on ranks whose weights have equal shapes, strides and dtypes."""
        self._pieces: list[list[tuple[Part, slice, slice]]] = [[] for _ in tensors]
        """For each tensor, its pieces in order: the part that stores the piece, the piece's range in that part, and its
        range in the tensor."""
        for part in self.parts:
            start = 0
            for tensor, first, end in part.pieces:
                self._pieces[tensor].append((part, slice(start, start + end - first), slice(first, end)))
                start += end - first
        self._copy = torch.zeros(self.bytes, dtype=torch.uint8, device="cpu")
        self._added = torch.zeros(self.bytes, dtype=torch.uint8, device="cpu")
        self._step = 0
        self._lock = threading.Lock()
        self._waiting: list[int] = []
        """Step numbers at which the weights were copied for exchanges whose results the live weights have not received
        yet. Guarded by `_lock`."""
        self._free: list[torch.Tensor] = []
        """Unused memory for messages: one tensor for each message, all of one size. Guarded by `_lock`."""
        self.users = 0
        """Number of exchanges that use this snapshot now. Guarded by the lock of the Pairing that owns the snapshot."""

    # Methods for the training thread ---------------------------------------------------------------------------

    def publish(self, tensors: Sequence[torch.Tensor], step: int) -> Counter[int]:
        """Add the collected differences to the live weights and copy the result into the snapshot. Called between two
        steps.

        Returns, for each number of steps made since the weights were copied for an exchange, how many such exchanges
        were applied.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._step = step
        flats = [_flat(t) for t in tensors]
        for part in self.parts:
            live = [flats[piece.tensor][piece.start : piece.stop] for piece in part.pieces]
            with part.lock:
                self._publish_part(part, live)
        for tensor, flat in zip(tensors, flats, strict=True):
            if tensor.numel() and flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))  # `flat` is a copy if the tensor has gaps in memory
        return Counter(step - before for before in waiting)

    def hand_over(self, lives: Sequence[torch.Tensor | None]) -> None:
        """Add the differences collected in this snapshot to the live tensors. Call it instead of `publish` once a newer
        snapshot has replaced this one. lives: the tensors, which may have moved or changed dtype; None for a freed
        tensor.
        """
        flats: dict[int, torch.Tensor] = {}
        for part in self.parts:
            with part.lock:
                if not part.changed:
                    continue
                memory, part.changed = part.of(self._added), False
                for piece, added in zip(part.pieces, torch.split(memory, part.sizes), strict=True):
                    if piece.tensor not in flats:
                        count = math.prod(self.kinds[piece.tensor].shape)
                        flats[piece.tensor] = torch.zeros(count, dtype=part.dtype, device="cpu")
                    flats[piece.tensor][piece.start : piece.stop] = added
                memory.zero_()
        for index, flat in flats.items():
            live = lives[index]
            if live is not None and tuple(live.shape) == self.kinds[index].shape:
                live.add_(_shaped(flat, self.kinds[index]).to(live))

    def _publish_part(self, part: Part, live: list[torch.Tensor]) -> None:
        copy, added = part.of(self._copy), part.of(self._added)
        if part.device.type == "cpu":
            if part.changed:
                torch._foreach_add_(live, torch.split(added, part.sizes))
            torch._foreach_copy_(torch.split(copy, part.sizes), live)
        else:
            moved = added.to(part.device) if part.changed else torch.empty_like(added, device=part.device)
            views = list(torch.split(moved, part.sizes))
            if part.changed:
                torch._foreach_add_(live, views)
            torch._foreach_copy_(views, live)
            copy.copy_(moved)
        if part.changed:
            added.zero_()
            part.changed = False

    # Methods for any thread ------------------------------------------------------------------------------------

    def take(self, size: int) -> torch.Tensor:
        """Return memory for a message of `size` bytes, to be returned by `give_back`. Frees unused memory of other
        sizes."""
        with self._lock:
            self._free = [message for message in self._free if len(message) == size]
            return self._free.pop() if self._free else torch.empty(size, dtype=torch.uint8, device="cpu")

    def give_back(self, *messages: torch.Tensor) -> None:
        with self._lock:
            self._free += messages

    @property
    def step(self) -> int:
        """Number of the step at which the weights were copied into the snapshot."""
        with self._lock:
            return self._step

    def read(self, part: Part, into: torch.Tensor) -> None:
        """Copy the snapshot's elements of `part` into the tensor `into`."""
        with part.lock:
            into.copy_(part.of(self._copy))

    def add(self, part: Part, difference: torch.Tensor) -> None:
        """Add `difference` to the snapshot's elements of `part`; the live weights receive the difference at the next
        step boundary."""
        with part.lock:
            for memory in (self._copy, self._added):
                torch._foreach_add_(grains(part.of(memory)), grains(difference))
            part.changed = True

    def read_tensor(self, index: int) -> torch.Tensor:
        """Return the snapshot's elements of tensor number `index`."""
        flat = torch.empty(math.prod(self.kinds[index].shape), dtype=self.kinds[index].dtype, device="cpu")
        for part, inside, piece in self._pieces[index]:
            with part.lock:
                flat[piece].copy_(part.of(self._copy)[inside])
        return flat

    def add_to_tensor(self, index: int, difference: torch.Tensor) -> None:
        """Add `difference` to the snapshot's elements of tensor number `index`; the live weights receive the difference
        at the next step boundary."""
        for part, inside, piece in self._pieces[index]:
            with part.lock:
                for memory in (self._copy, self._added):
                    torch._foreach_add_(grains(part.of(memory)[inside]), grains(difference[piece]))
                part.changed = True

    def moved(self, step: int) -> None:
        """Record that the result of an exchange, with the weights copied at step `step`, was added to the snapshot."""
        with self._lock:
            self._waiting.append(step)


def grains(flat: torch.Tensor) -> list[torch.Tensor]:
    """Split the tensor into pieces so short that torch computes with each of them in the calling thread alone."""
    return list(torch.split(flat, _GRAIN))


def _parts(tensors: Sequence[torch.Tensor]) -> list[Part]:
    groups: dict[tuple[torch.dtype, torch.device], list[TensorPiece]] = {}
    for index, tensor in enumerate(tensors):
        most = max(1, PART_BYTES // tensor.element_size())
        groups.setdefault((tensor.dtype, tensor.device), []).extend(
            TensorPiece(index, start, min(start + most, tensor.numel())) for start in range(0, tensor.numel(), most)
        )
    parts: list[Part] = []
    for (dtype, device), pieces in groups.items():
        while pieces:
            taken = _up_to(pieces, PART_BYTES // dtype.itemsize)
            start = -(-parts[-1].stop // _ALIGNMENT) * _ALIGNMENT if parts else 0
            parts.append(Part(pieces[:taken], dtype, device, start))
            pieces = pieces[taken:]
    return parts


def _up_to(pieces: Sequence[TensorPiece], most: int) -> int:
    """Return how many pieces, from the first on, have at most `most` elements together; at least 1."""
    total = 0
    for count, piece in enumerate(pieces):
        total += piece.stop - piece.start
        if total > most:
            return max(1, count)
    return len(pieces)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements in the order of its memory; as a copy if the memory has gaps."""
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.contiguous().view(-1)


def _shaped(flat: torch.Tensor, kind: TensorLayout) -> torch.Tensor:
    """Return a tensor of layout `kind`, built from its elements in the order of memory; the inverse of `_flat`."""
    like = torch.empty_strided(kind.shape, kind.stride, device="meta", dtype=kind.dtype)
    dense = torch.empty_like(like).stride() == kind.stride
    return flat.as_strided(kind.shape, kind.stride) if dense else flat.view(kind.shape)
