"""How the tensors of one optimizer's exchanges are divided into buckets, and how each is compressed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property
from sys import getrefcount

import torch
from torch import nn

from dadt.comm import shards
from dadt.comm.bucket import Bucket, split
from dadt.comm.compression import LowRank, carried, forms
from dadt.comm.executors.device import Device
from dadt.train.exchange.sent import Looks
from dadt.train.storage import storage_uses

_REFERENCES = max(map(getrefcount, [object()]))
"""Reference count of an object to which only one list refers."""


END_BYTES = 1 << 20
"""Size in bytes of the first and of the last of several buckets. They are small because `sync` begins to send once the
first bucket is complete, and sends the last one when there is nothing left to compute meanwhile."""


class BucketPlan:
    """The buckets of one optimizer's exchanges, equal on all ranks: buckets of gradients, with the last parameters
    first, and buckets of module buffers."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[tuple[nn.Module, str, torch.Tensor]],
        max_bytes: int,
        device: Device | None = None,
        turns: int = 2,
        compression: str = "none",
        momentum: bool = False,
        finely: set[torch.Tensor] | frozenset[torch.Tensor] = frozenset(),
    ) -> None:
        """device: averages tensors in GPU memory, if not None. turns: number of contiguous buffers of each bucket. It
        is 1 if no exchange is under way between steps; a second buffer is then allocated only if the first is still in
        use. compression: name of the gradients' compression. momentum: whether momentum is sent in place of
        gradients. finely: parameters whose momentum needs more bits than the compression's name says."""
        self.parameters = list(parameters)
        places = {id(b): (m, n) for m, n, b in buffers}
        self.device = device
        direct = None if device is None else device.device
        # Buckets begin with the last parameters, as backward computes their gradients first.
        self.buckets = split(self.parameters[::-1], max_bytes, direct, turns, ends=END_BYTES, apart=finely)
        # Module buffers have at least two turns (memory of one exchange), because the script reads the newest averages
        # while the next ones arrive.
        self.buffer_buckets = split([b for _, _, b in buffers], max_bytes, direct, max(2, turns))
        self.places = [places[id(b)] for bucket in self.buffer_buckets for b in bucket.tensors]
        """Module and buffer name of each averaged buffer, in the order of the buckets."""
        tensors = [*self.parameters, *(b for _, _, b in buffers)]
        self.crc = zlib.crc32(
            repr([(tuple(t.shape), str(t.dtype), t.device.type, shards.place(t)) for t in tensors]).encode()
        )
        self.on_gpu = any(p.is_cuda for p in self.parameters)
        self.looks = Looks()
        self.turns = turns
        self.turn = self.buffer_turn = 0
        self.late = turns > 1
        self._uses: dict[int, list[int]] = {}
        """Reference counts of the buckets' memory, by its index, at a time when nothing but this plan refers to it."""
        self._momentum, self._finely = momentum, finely.intersection(self.parameters)
        self.forms = forms(compression, self.buckets, momentum=momentum, finely=finely)
        """The compression of each bucket of gradients, None if a bucket is not compressed."""

    def compress(self, name: str, *, momentum: bool = False) -> None:
        """Change the compression of later exchanges, which also send what gradients' compression still owes."""
        made = forms(name, self.buckets, momentum=momentum, finely=self._finely)
        # Residuals of momentum, and those on a device, are not in units of gradients.
        of_gradients = not (self._momentum or momentum or self.device is not None)
        self.forms, self._momentum = carried(self.forms, made) if of_gradients else made, momentum

    def next_turn(self) -> None:
        """Choose the contiguous buffers that the next exchange will use. Called when the exchange begins."""
        self.buffer_turn = (self.buffer_turn + 1) % max(2, self.turns)
        for _ in range(self.turns):
            self.turn = (self.turn + 1) % self.turns
            if self.late or self._is_free(self.turn):
                return
        if self.turns == 1:
            for bucket in self._all_buckets:
                bucket.add_turn()
            self.turns = 2
            self._uses[1] = self._uses_of(1)
            self.__dict__.pop("addresses", None)
        self.turn = (self.turn + 1) % self.turns

    def look_for_moved(self) -> None:
        """Allocate new memory for buckets if tensors were moved elsewhere, where averages would not reach them."""
        for bucket in self.buckets:
            for turn in range(self.turns):
                if bucket.has_moved(turn):
                    bucket.renew(turn)
                    self._uses.pop(turn, None)
                    self.__dict__.pop("addresses", None)

    def _uses_of(self, turn: int) -> list[int]:
        return [storage_uses(bucket.views[turn][0].untyped_storage()._cdata) for bucket in self.buckets]

    @property
    def _all_buckets(self) -> list[Bucket]:
        """All buckets of gradients, and the buckets of low-rank factors that are sent in place of some of them."""
        low_ranks = [form for form in self.forms if isinstance(form, LowRank)]
        return [*self.buckets, *(bucket for form in low_ranks for bucket in (form.first, form.second))]

    def _is_free(self, turn: int) -> bool:
        """Whether the buckets' memory with index `turn` is free. It is not if the `.grad` of a parameter is in it, as
        when the script zeroes gradients in place, or if the script has another reference to gradients in it."""
        uses = self._uses_of(turn)
        if uses != self._uses.setdefault(turn, uses):
            return False
        for bucket in self.buckets:
            gradients = [g for g in shards.gradients(bucket.tensors) if g is not None]
            places = set(bucket.pointers[turn])
            if not places.isdisjoint(map(torch.Tensor.data_ptr, filter(_is_strided, gradients))):
                return False
            if max(map(getrefcount, bucket.views[turn])) > _REFERENCES:
                return False
        return True

    @cached_property
    def addresses(self) -> frozenset[int]:
        """Memory addresses at which averaged gradients arrive."""
        return frozenset(address for bucket in self.buckets for turn in bucket.pointers for address in turn)

    def buffers(self) -> list[torch.Tensor]:
        """Return the current buffers in the order of their buckets, as a forward may have replaced the tensors."""
        now = [module._buffers[name] for module, name in self.places]
        return [b.detach() for b in now if b is not None]

    def forget_residuals(self) -> None:
        """Drop all residuals of the compression, so that the next exchange starts like the first. All ranks call it."""
        for form in self.forms:
            if form is not None:
                form.forget()


def _is_strided(gradient: torch.Tensor) -> bool:
    return gradient.layout == torch.strided
