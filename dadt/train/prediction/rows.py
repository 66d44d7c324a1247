"""Groups tensors into rows, one for each parameter, that the C++ core's loops or a GPU kernel can process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import TypeVar

import torch

from dadt import _core
from dadt.comm.bucket import DTYPES
from dadt.train.prediction.memory import address

_FLOATING = frozenset(dtype for dtype in DTYPES if dtype.is_floating_point)
_is_cpu, _dtype, _device, _layout = map(attrgetter, ("is_cpu", "dtype", "device", "layout"))
_stride = torch.Tensor.stride
Row = Sequence[torch.Tensor | None]
"""Tensors of one parameter that are processed together, such as its weight, gradient and momentum."""
AnyRow = TypeVar("AnyRow", bound=Row)
Column = Sequence[torch.Tensor | None]
Group = tuple[_core.DType, list[int], list[list[int]]]
"""Tensors prepared for the C++ core: dtype, number of elements of each row, and column by column the memory addresses
(0 for None)."""
Kind = tuple[torch.dtype, torch.device]


class LastColumns:
    """Remembers the columns that were found to have one dtype, device and memory order in the last step, because most
    columns of the next step consist of the same objects and need no further check."""

    def __init__(self, without: int | None = None) -> None:
        """without: index of a column whose tensors must not be kept alive."""
        self._without = without
        self._beside: tuple[Kind, list[tuple[int, ...]]] | None = None
        self._columns: dict[int, Column] = {}
        """Remembered columns, by the id of the first tensor in each."""

    def fit(self, columns: list[Column]) -> bool:
        """Whether the tensors of each row have one dtype, device and memory order, and all rows have one dtype and
        device."""
        first = [t for t in columns[0] if t is not None]
        if not first or first[0].dtype not in _FLOATING:
            return False
        kind = (first[0].dtype, first[0].device)
        if not _is_plain(first, *kind):
            return False
        beside = (kind, list(map(_stride, first)))
        known = self._columns if beside == self._beside else {}
        for column in columns[1:]:
            other = known.get(id(column[0]), ())
            if not (len(other) == len(column) and all(map(is_, column, other))) and not _fits(column, *beside):
                return False
        self._beside = beside
        self._columns = {id(c[0]): c for i, c in enumerate(columns) if i != self._without}
        return True


def grouped(rows: Iterable[AnyRow], seen: LastColumns | None = None) -> tuple[list[Group], list[AnyRow]]:
    """Return groups of rows, by dtype, that the C++ core's loops can process, and the list of all other rows."""
    kinds, others = by_kind(rows, seen)
    groups = []
    for (_, device), some in kinds.items():
        if device.type == "cpu":
            groups.append(_group(some))
        else:
            others += some
    return groups, others


def by_kind(rows: Iterable[AnyRow], seen: LastColumns | None = None) -> tuple[dict[Kind, list[AnyRow]], list[AnyRow]]:
    """Return the rows whose tensors have one dtype, device and memory order, grouped by dtype and device, and the list
    of all other rows."""
    every = list(rows)
    if every and (seen or LastColumns()).fit(list(zip(*every, strict=True))):
        first = every[0][0]
        assert first is not None
        return {(first.dtype, first.device): every}, []
    kinds: dict[Kind, list[AnyRow]] = {}
    others = []
    for row in every:
        if row[0] is not None and _fit(row):
            kinds.setdefault((row[0].dtype, row[0].device), []).append(row)
        else:
            others.append(row)
    return kinds, others


def beside(tensor: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor | float:
    """Return the weight on the tensor's device, as parameters may be on several devices."""
    return weight.to(tensor.device) if isinstance(weight, torch.Tensor) else weight


def in_core(row: Row) -> bool:
    """Whether the C++ core's loops can process this row: all its tensors are on the CPU, with one dtype and memory
    order."""
    return row[0] is not None and row[0].is_cpu and _fit(row)


def _fit(row: Row) -> bool:
    """Whether all tensors of the row are on one device, have one floating-point dtype and one memory order, and have no
    gaps in memory (as from empty_like)."""
    first = row[0]
    if first is None or first.dtype not in _FLOATING:
        return False
    dtype, device, stride = first.dtype, first.device, first.stride()
    for t in row:  # a plain loop is fastest, which matters as it runs for each parameter and step
        if t is None or t is first:
            continue
        if t.dtype is not dtype or t.layout is not torch.strided or t.device != device:
            return False
        if t.stride() != stride and not _walks(t, stride):
            return False
    return True


def _walks(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether the tensor has these strides, apart from dimensions of size 1, whose strides do not matter and often
    differ between the weights of 1x1 convolutions and their gradients."""
    mine = tensor.stride()
    return len(mine) == len(stride) and all(
        n == 1 or a == b for n, a, b in zip(tensor.shape, mine, stride, strict=True)
    )


def _group(rows: Sequence[Row]) -> Group:
    first, *others = zip(*rows, strict=True)
    sizes = [t.numel() for t in first]
    return DTYPES[first[0].dtype], sizes, [list(map(address, first)), *map(addresses, others)]


def addresses(column: Column) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in column]


def _fits(column: Column, kind: Kind, strides: Sequence[tuple[int, ...]]) -> bool:
    there = [t for t in column if t is not None]
    if len(there) < len(column):
        strides = [s for s, t in zip(strides, column, strict=True) if t is not None]
    return _is_plain(there, *kind) and (list(map(_stride, there)) == strides or all(map(_walks, there, strides)))


def _is_plain(tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    return (
        (all(map(_is_cpu, tensors)) if device.type == "cpu" else set(map(_device, tensors)) <= {device})
        and all(map(torch.strided.__eq__, map(_layout, tensors)))
        and set(map(_dtype, tensors)) <= {dtype}
    )
