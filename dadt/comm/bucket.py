"""Buckets: groups of tensors that travel together in an exchange, side by side in one contiguous (flat) buffer."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cached_property
from typing import NamedTuple

import torch

from dadt import _core
from dadt.comm.shards import local

DTYPES = {
    torch.float32: _core.DType.float32,
    torch.float64: _core.DType.float64,
    torch.float16: _core.DType.float16,
    torch.bfloat16: _core.DType.bfloat16,
    torch.int64: _core.DType.int64,
    torch.int32: _core.DType.int32,
    torch.int16: _core.DType.int16,
    torch.int8: _core.DType.int8,
    torch.uint8: _core.DType.uint8,
    # Complex numbers travel as pairs of floats, bools as bytes.
    torch.complex64: _core.DType.float32,
    torch.complex128: _core.DType.float64,
    torch.bool: _core.DType.uint8,
}
_ALIGNMENT = 16  # elements per alignment unit, so that every fp32 tensor starts on a new cache line
_LARGE = 1 << 20
"""Size in bytes from which a flat buffer has extra room for step metadata (lanes), so that values and metadata can be
reduced together in place."""
_RANKS, _LANE = 64, 64
"""Extra room behind a flat buffer: step metadata (lanes) of up to 64 ranks, each 64 bytes plus one bit per tensor. If
the metadata needs more, the buffer is not reduced in place."""


class Staged(NamedTuple):
    """Tensors that are ready to exchange once the GPU has reached the CUDA event `ready`, or immediately if it is
    None."""

    values: list[torch.Tensor | None]
    ready: torch.cuda.Event | None


class Bucket:
    """Tensors of one dtype and device that are exchanged together; all ranks have the same buckets.

    The exchange of step t fills flat buffer t % turns. With one buffer more than exchanges in flight, an exchange never
    overwrites memory that the script still uses as `.grad`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], direct: bool = False, turns: int = 2) -> None:
        """tensors: if one is sharded, only this rank's part of it is sent. direct: whether the executor moves the
        tensors' device memory itself, so that the flat buffers are allocated on the device. turns: number of flat
        buffers."""
        self.tensors = list(tensors)
        first = self.tensors[0]
        self.device = first.device
        self.direct = direct
        self.staged = first.is_cuda and not direct
        """Whether tensors on a GPU are copied to host memory for the exchange."""
        self.turns = turns
        self.dtype = first.dtype
        self.parts = [local(t) for t in self.tensors]
        """The part of each tensor that this rank stores and sends."""
        self.strides = [_dense_strides(t) for t in self.parts]
        parts = 2 if first.dtype.is_complex else 1
        self.layout = _core.Layout(DTYPES[first.dtype], [t.numel() * parts for t in self.parts])
        self.flats: list[torch.Tensor] = []

    @property
    def of_host(self) -> bool:
        """Whether the tensors are on the CPU, so that an exchange can use them without waiting for a copy from a
        device."""
        return self.device.type == "cpu" and not self.direct

    @cached_property
    def views(self) -> list[list[torch.Tensor]]:
        """Views of the tensors in each flat buffer, indexed by buffer and then tensor. The buffers are allocated on
        first use."""
        return [self._carve() for _ in range(self.turns)]

    @cached_property
    def pointers(self) -> list[list[int]]:
        """Memory addresses of the tensors' views in each flat buffer, indexed by buffer and then tensor."""
        return [[v.data_ptr() for v in views] for views in self.views]

    def room(self, turn: int) -> int:
        """Return the number of elements of flat buffer `turn`, including the extra room behind the last tensor."""
        return self.flats[turn].untyped_storage().nbytes() // self.layout.dtype.itemsize

    def has_moved(self, turn: int) -> bool:
        """Return whether the script has replaced the memory of a view in flat buffer `turn`, for example by assigning
        `.data`."""
        made = "views" in self.__dict__
        return made and list(map(torch.Tensor.data_ptr, self.views[turn])) != self.pointers[turn]

    def renew(self, turn: int) -> None:
        """Replace flat buffer `turn` by newly allocated memory, because a library may still write to the old one."""
        self.views[turn] = self._carve()
        self.flats[turn] = self.flats.pop()
        self.pointers[turn] = [v.data_ptr() for v in self.views[turn]]

    @cached_property
    def _offsets(self) -> list[int]:
        offsets = [0]
        for t in self.parts:
            offsets.append(offsets[-1] + -(-t.numel() // _ALIGNMENT) * _ALIGNMENT)
        return offsets

    def _carve(self) -> list[torch.Tensor]:
        offsets = self._offsets
        # Without a device executor, GPU gradients go through host memory: the C++ core moves host memory only.
        where = self.device if self.direct else torch.device("cpu")
        large = not self.direct and offsets[-1] * self.dtype.itemsize >= _LARGE
        tail = _RANKS * (_LANE + len(self.tensors) // 8) if large else 0
        flat = torch.zeros(offsets[-1] + tail, dtype=self.dtype, device=where, pin_memory=self.staged)
        # The last tensor is not padded to the alignment: the step metadata begins right behind its values.
        self.flats.append(flat[: offsets[-2] + self.parts[-1].numel()] if large else flat)
        return self._views_of(flat)[1]

    def _views_of(self, flat: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the flat buffer and, for each tensor of the bucket, a tensor that lies in the buffer's memory.
        Autograd does not know these tensors as views: it forbids detach_() on views, and scripts call detach_() on
        gradients."""
        return flat, [
            torch.empty(0, dtype=self.dtype, device=flat.device).set_(flat.untyped_storage(), o, t.size(), s)
            for o, t, s in zip(self._offsets, self.parts, self.strides, strict=False)
        ]

    def add_turn(self) -> None:
        """Allocate one more flat buffer, so that one more exchange can be in flight."""
        self.views.append(self._carve())
        self.turns += 1
        self.__dict__.pop("pointers", None)

    def stage(self, values: Sequence[torch.Tensor | None], turn: int) -> Staged:
        """Return the values in memory that the exchange can read, with the strides that all ranks use. A value is
        copied only if its device, dtype or strides do not fit.

        Copies from a GPU run asynchronously; the result's `ready` event marks their end.
        """
        if not self.staged:
            return Staged([None if v is None else self._stage(i, v, turn) for i, v in enumerate(values)], None)
        # An earlier exchange has left some of the values in host memory.
        if any(v is not None and not v.is_cuda for v in values):
            return Staged([None if v is None else self._stage(i, v, turn) for i, v in enumerate(values)], self._now())
        return self._bring([None if v is None else plain(v) for v in values], turn)

    def fill(self, values: Sequence[torch.Tensor], turn: int) -> Staged:
        """Copy all values into flat buffer `turn`, even values that the exchange could read where they are."""
        if self.staged:
            return self._bring(values, turn)
        torch._foreach_copy_(self.views[turn], list(values))
        return Staged([*self.views[turn]], None)

    def _bring(self, values: Sequence[torch.Tensor | None], turn: int) -> Staged:
        """Copy values from a GPU to host memory: pack them into one tensor on the GPU, then copy this tensor on a
        separate CUDA stream while computation continues."""
        views = self.views[turn]
        flat, places = self._views_of(torch.zeros(self._offsets[-1], dtype=self.dtype, device=self.device))
        moved = [(place, v) for place, v in zip(places, values, strict=True) if v is not None]
        if moved:
            torch._foreach_copy_([place for place, _ in moved], [v for _, v in moved])
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            into = self.flats[turn]
            into.copy_(flat[: len(into)], non_blocking=True)
            ready = self._now()
        flat.record_stream(self._stream)
        return Staged([None if v is None else view for v, view in zip(values, views, strict=True)], ready)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call,no-any-return,unused-ignore]

    def _now(self) -> torch.cuda.Event:
        happened = torch.cuda.Event()  # type: ignore[no-untyped-call]
        happened.record(torch.cuda.current_stream(self.device))
        return happened

    def _stage(self, index: int, value: torch.Tensor, turn: int) -> torch.Tensor:
        if value.layout is not torch.strided or value.requires_grad or value.is_conj() or value.is_neg():
            value = plain(value)
        view = self.views[turn][index]
        if value.device == view.device and value.dtype == self.dtype and value.stride() == self.strides[index]:
            return value
        view.copy_(value, non_blocking=True)
        return view

    def deliver(self, index: int, turn: int) -> torch.Tensor:
        """Return averaged tensor `index` on the parameters' device: a view of flat buffer `turn`, or a copy of the
        view."""
        view = self.views[turn][index]
        return view if view.device == self.device else view.to(self.device, non_blocking=True)

    def deliver_all(self, turn: int) -> list[torch.Tensor]:
        """Return all averaged tensors on the parameters' device: views of flat buffer `turn`, or views of one copy of
        the buffer."""
        if self.direct or self.device.type == "cpu":
            return self.views[turn]
        return self._views_of(self.flats[turn].to(self.device, non_blocking=True))[1]


def split(
    tensors: Sequence[torch.Tensor],
    max_bytes: int,
    direct: torch.device | None = None,
    turns: int = 2,
    *,
    ends: int = 0,
    apart: Set[torch.Tensor] = frozenset(),
) -> list[Bucket]:
    """Split tensors into buckets of at most about `max_bytes` bytes, in the given order, each of one dtype and device.

    direct: the device whose memory the executor moves itself. turns: number of flat buffers per bucket. ends: bytes at
    which the first of several buckets is complete, and the most bytes of the last one, besides a larger tensor; 0: both
    are like the others. apart: tensors that share no bucket with others. A tensor larger than max_bytes gets a bucket
    of its own. The result depends on the arguments only, so all ranks get the same buckets.
    """
    sizes = [_bytes(t) for t in tensors]
    ends = min(ends, max_bytes) if sum(sizes) > max_bytes else 0
    open_parts: dict[tuple[torch.dtype, torch.device, bool], tuple[list[torch.Tensor], int]] = {}
    parts: list[list[torch.Tensor]] = []
    for t, size in zip(tensors, sizes, strict=True):
        key = (t.dtype, t.device, t in apart)
        part, before = open_parts.get(key, ([], 0))
        if part and (before + size > max_bytes or (not parts and 0 < ends <= before)):
            parts.append(part)
            part, before = [], 0
        part.append(t)
        open_parts[key] = part, before + size
    parts += [part for part, _ in open_parts.values()]
    if ends:
        parts[-1:] = _with_small_end(parts[-1], ends)
    return [Bucket(part, part[0].device == direct, turns) for part in parts]


def _with_small_end(tensors: list[torch.Tensor], most: int) -> list[list[torch.Tensor]]:
    """Split off the last tensors that have at most `most` bytes together, if other tensors remain."""
    left, start = most, len(tensors)
    while start > 0 and (left := left - _bytes(tensors[start - 1])) >= 0:
        start -= 1
    return [tensors[:start], tensors[start:]] if 0 < start < len(tensors) else [tensors]


def _bytes(tensor: torch.Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def plain(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy whose memory holds the values themselves: dense, detached, and neither lazily
    conjugated nor lazily negated."""
    if value.layout != torch.strided:
        value = value.to_dense()
    # A lazily conjugated or negated tensor's memory differs from the tensor's values.
    if value.requires_grad or value.is_conj() or value.is_neg():
        value = value.detach().resolve_conj().resolve_neg()
    return value


def _dense_strides(t: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that gradients of `t` have: the strides of `t` if it is dense, else contiguous ones."""
    return tuple(torch.empty_like(t, device="meta").stride())
