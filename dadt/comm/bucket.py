"""Flat buffers that several tensors live in: what one exchange moves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from dadt import _core

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
    # Complex numbers travel as pairs of floats; bools as bytes.
    torch.complex64: _core.DType.float32,
    torch.complex128: _core.DType.float64,
    torch.bool: _core.DType.uint8,
}
_ALIGNMENT = 16  # elements: every tensor starts on a cache line of fp32
_LARGE = 1 << 20
"""Bytes from which a flat buffer has room for lanes, so that it can be reduced where it is."""
_RANKS, _LANE = 64, 64
"""Room behind a buffer: the lanes of 64 ranks, each of 64 bytes plus a bit per tensor. If lanes need more, the buffer
is not reduced where it is."""


class Staged(NamedTuple):
    """Tensors to exchange. They are ready once the event `ready` has happened, or now if it is None."""

    values: list[torch.Tensor | None]
    ready: torch.cuda.Event | None


class Bucket:
    """Tensors of one dtype and device, exchanged together; the same on all ranks.

    Flat buffers take turns (the exchange of step t fills buffer t % turns), so that what the script holds as
    `.grad` is never overwritten by an exchange in flight: one more than there are of those.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], direct: bool = False, turns: int = 2) -> None:
        """direct: the buffers are on the tensors' device, for an executor that moves its memory."""
        self.tensors = list(tensors)
        first = self.tensors[0]
        self.device = first.device
        self.direct = direct
        self.staged = first.is_cuda and not direct
        """Whether tensors of a GPU go through host memory."""
        self.turns = turns
        self.dtype = first.dtype
        self.strides = [_dense_strides(t) for t in self.tensors]
        parts = 2 if first.dtype.is_complex else 1
        self.layout = _core.Layout(DTYPES[first.dtype], [t.numel() * parts for t in self.tensors])
        self.flats: list[torch.Tensor] = []

    @property
    def of_host(self) -> bool:
        """Whether the exchange uses the tensors' own memory, or a copy that is there at once."""
        return self.device.type == "cpu" and not self.direct

    @cached_property
    def views(self) -> list[list[torch.Tensor]]:
        """The tensors' places in each of the buffers, which are made when they are first asked for."""
        return [self._carve() for _ in range(self.turns)]

    @cached_property
    def pointers(self) -> list[list[int]]:
        """The memory address of each tensor's place in each of the buffers."""
        return [[v.data_ptr() for v in views] for views in self.views]

    def room(self, turn: int) -> int:
        """Number of elements of this turn's flat buffer, with the room behind it."""
        return self.flats[turn].untyped_storage().nbytes() // self.layout.dtype.itemsize

    def has_moved(self, turn: int) -> bool:
        """Whether the script has given a place other memory."""
        made = "views" in self.__dict__
        return made and list(map(torch.Tensor.data_ptr, self.views[turn])) != self.pointers[turn]

    def renew(self, turn: int) -> None:
        """Use new memory for this turn, as a library may still write to the old."""
        self.views[turn] = self._carve()
        self.flats[turn] = self.flats.pop()
        self.pointers[turn] = [v.data_ptr() for v in self.views[turn]]

    @cached_property
    def _offsets(self) -> list[int]:
        offsets = [0]
        for t in self.tensors:
            offsets.append(offsets[-1] + -(-t.numel() // _ALIGNMENT) * _ALIGNMENT)
        return offsets

    def _carve(self) -> list[torch.Tensor]:
        offsets = self._offsets
        # Gradients on a GPU are else staged through host memory: the core moves bytes of the host.
        where = self.device if self.direct else torch.device("cpu")
        large = not self.direct and offsets[-1] * self.dtype.itemsize >= _LARGE
        tail = _RANKS * (_LANE + len(self.tensors) // 8) if large else 0
        flat = torch.zeros(offsets[-1] + tail, dtype=self.dtype, device=where, pin_memory=self.staged)
        # Lanes begin right behind the last tensor.
        self.flats.append(flat[: offsets[-2] + self.tensors[-1].numel()] if large else flat)
        return self._views_of(flat)[1]

    def _views_of(self, flat: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The flat buffer, and for each tensor its place in the same memory. To autograd the places are no views, on
        which it forbids detach_(), which scripts call on gradients."""
        return flat, [
            torch.empty(0, dtype=self.dtype, device=flat.device).set_(flat.untyped_storage(), o, t.size(), s)
            for o, t, s in zip(self._offsets, self.tensors, self.strides, strict=False)
        ]

    def add_turn(self) -> None:
        """Add a flat buffer, and so a turn."""
        self.views.append(self._carve())
        self.turns += 1
        self.__dict__.pop("pointers", None)

    def stage(self, values: Sequence[torch.Tensor | None], turn: int) -> Staged:
        """The values in the order that all ranks use, in the bucket's kind of memory; copied only where they are not.

        Copies from a GPU go on while the caller does something else.
        """
        if not self.staged:
            return Staged([None if v is None else self._stage(i, v, turn) for i, v in enumerate(values)], None)
        if any(v is not None and not v.is_cuda for v in values):  # what has come to the host by an exchange before
            return Staged([None if v is None else self._stage(i, v, turn) for i, v in enumerate(values)], self._now())
        return self._bring([None if v is None else plain(v) for v in values], turn)

    def fill(self, values: Sequence[torch.Tensor], turn: int) -> Staged:
        """Like `stage`, but the values are always copied into the bucket."""
        if self.staged:
            return self._bring(values, turn)
        torch._foreach_copy_(self.views[turn], list(values))
        return Staged([*self.views[turn]], None)

    def _bring(self, values: Sequence[torch.Tensor | None], turn: int) -> Staged:
        """A GPU's tensors are packed there, and leave it together, beside what it computes."""
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
        """The averaged tensor on the parameter's device: a view of the flat buffer, or its copy."""
        view = self.views[turn][index]
        return view if view.device == self.device else view.to(self.device, non_blocking=True)

    def deliver_all(self, turn: int) -> list[torch.Tensor]:
        """All averaged tensors, as `deliver` gives each; where they must be copied, in one copy."""
        if self.direct or self.device.type == "cpu":
            return self.views[turn]
        return self._views_of(self.flats[turn].to(self.device, non_blocking=True))[1]


def split(
    tensors: Sequence[torch.Tensor], max_bytes: int, direct: torch.device | None = None, turns: int = 2
) -> list[Bucket]:
    """Buckets of at most about max_bytes, in the given order, one dtype and device each.

    direct: the device whose memory the executor moves. A tensor larger than max_bytes gets a bucket of its own.
    Depends on the tensors alone: the same on all ranks.
    """
    open_parts: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    buckets: list[Bucket] = []
    for t in tensors:
        key = (t.dtype, t.device)
        part = open_parts.setdefault(key, [])
        if part and (sum(x.numel() for x in part) + t.numel()) * t.element_size() > max_bytes:
            buckets.append(Bucket(part, part[0].device == direct, turns))
            part = open_parts[key] = []
        part.append(t)
    return buckets + [Bucket(part, part[0].device == direct, turns) for part in open_parts.values()]


def plain(value: torch.Tensor) -> torch.Tensor:
    """The tensor, or one with the same values, whose memory holds the values themselves: dense, and neither lazily
    conjugated nor negated."""
    if value.layout != torch.strided:
        value = value.to_dense()
    # A lazily conjugated or negated tensor's memory does not hold its values.
    if value.requires_grad or value.is_conj() or value.is_neg():
        value = value.detach().resolve_conj().resolve_neg()
    return value


def _dense_strides(t: torch.Tensor) -> tuple[int, ...]:
    """Strides that gradients of t have: its own if it is dense, else contiguous ones."""
    return tuple(torch.empty_like(t, device="meta").stride())
