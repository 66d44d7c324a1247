"""Finds out whether parameters may be moved between their own memory and the memory of predicted weights, because no
other tensors share it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

from dadt.train.storage import storage_uses

address = torch.Tensor.data_ptr
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def _uses_of_two() -> int:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    data = parameter.data
    return storage_uses(data.untyped_storage()._cdata)


_USES = _uses_of_two()
"""Reference count of a storage that only a parameter and one other tensor share."""


def lends(parameter: torch.Tensor) -> bool:
    """Whether a parameter may be given other memory: it must be on a CPU or GPU, and only one tensor of DADT's, and no
    other such as a view, may share its memory."""
    return _may_lend(parameter) and bool(storage_uses(parameter.untyped_storage()._cdata) <= _USES)


class Memory:
    """The memory of one tensor for each parameter. It checks all parameters at once without Python loops, as each step
    needs these checks."""

    def __init__(self, parameters: Sequence[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._plain = all(map(_may_lend, parameters))
        self._addresses = list(map(address, tensors)) if self._plain else []
        self._described = _describe(tensors) if self._plain else None
        # The storages' addresses stay valid while `tensors` keeps the storages alive.
        self._storages = [t.untyped_storage()._cdata for t in tensors] if self._plain else []

    def shown_by(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether each parameter has the memory, shape, strides and dtype of its tensor."""
        at = list(map(address, parameters)) if self._plain else None
        return at == self._addresses and _describe(parameters) == self._described

    def is_lent(self) -> bool:
        """Whether all parameters that use this memory may be given other memory, by the rules of `lends`."""
        return self._plain and max(map(storage_uses, self._storages), default=0) <= _USES


def _may_lend(parameter: torch.Tensor) -> bool:
    somewhere = parameter.is_cpu or parameter.is_cuda
    return somewhere and parameter.layout == torch.strided and type(parameter) in (torch.Tensor, nn.Parameter)


def _describe(tensors: Sequence[torch.Tensor]) -> tuple[list[object], ...]:
    return list(map(_shape, tensors)), list(map(torch.Tensor.stride, tensors)), list(map(_dtype, tensors))
