"""Records the sizes of results that depend on the values of tensors, such as the length of `y[prediction == y]`. In a
replay, tensors have no real values, so results get the recorded sizes.

The number of selected elements is recorded where torch counts them: a mask as an index, `where(mask)` and `argwhere`
all use torch's kernel of `nonzero`. So scripts and compilers see the original functions, and compiled, traced or
scripted code is covered as well. The kernels of `unique` cannot be called from a replacement, so `unique` is replaced
where Python calls it. Kernels of `bincount` and similar operations can be called since torch 2.9.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from torch.jit import _builtins

from dadt.inject.replay.values import ReadValues

_UNIQUE = (
    (torch, "_unique2", None),
    (torch._VF, "unique_consecutive", None),
    (torch._VF, "unique_dim", 1),
)
"""Functions by module and name, with the index of the argument that names the dimension along which they select; None
for functions without this argument."""
_COUNTING = (("bincount", 0), ("repeat_interleave.Tensor", 0), ("one_hot", -1))
"""Operations whose results have a size that depends on values, and the dimension of this size."""
_MOST = 2**28
"""Largest plausible size of such a result along this dimension; a larger recorded size is an error."""
_DEVICES = ("CPU", "CUDA")


class Selections:
    """Records how many elements operations select by the values of tensors and, in a replay, returns results of the
    recorded sizes. There is one object per process."""

    def __init__(self, values: ReadValues) -> None:
        self._values = values
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # its kernels go when it is freed
        self._given: dict[int, int] = {}
        """In a replay, the number of elements that each mask selects, by the mask's memory address, because a backward
        counts the elements of its forward's mask once more and must get the same number."""

    def install(self, *, replaying: bool) -> None:
        with warnings.catch_warnings():
            # torch warns that kernels are replaced; the replacements call the original ones
            warnings.simplefilter("ignore")
            for device in _DEVICES:
                self._library.impl("nonzero", self._nonzero, device)  # type: ignore[no-untyped-call]
                self._library.impl("masked_select", self._masked_select, device)  # type: ignore[no-untyped-call]
            for (name, dim), device in product(_COUNTING, _DEVICES):
                # older versions of torch lack the function, or this kernel
                with suppress(AttributeError, RuntimeError):
                    kernel = torch.library.get_kernel(f"aten::{name}", device)
                    self._library.impl(name, self._counting(kernel.call_boxed, dim), device, with_keyset=True)  # type: ignore[no-untyped-call]
        for place, name, argument in _UNIQUE:
            original = getattr(place, name)
            unique = self._unique(original, argument)
            setattr(place, name, unique)
            _builtins._register_builtin(unique, f"aten::{name}")  # makes TorchScript use the replacement, too
        if replaying:
            torch.masked_select = self._by_index(torch.masked_select)
            _builtins._register_builtin(torch.masked_select, "aten::masked_select")
            torch.Tensor.masked_select = self._by_index(torch.Tensor.masked_select)  # type: ignore[method-assign]

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        found = torch.ops.aten.nonzero.out(mask, out=torch.empty(0, dtype=torch.int64, device=mask.device))
        values = self._values
        if torch._C._current_graph_task_id() != -1:  # a backward must use the selection of its forward
            count = self._given.get(mask.data_ptr(), len(found)) if values.replaying else len(found)
        elif not values.heeds():
            count = len(found)
            self._given.pop(mask.data_ptr(), None)
        else:
            count = values.counted(len(found), mask.numel())
            if values.replaying:
                self._given[mask.data_ptr()] = count
            elif self._given:
                self._given.clear()
        return fitted(found, count)

    def _masked_select(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        found: torch.Tensor = torch.ops.aten.masked_select.out(tensor, mask, out=empty)
        if torch._C._current_graph_task_id() != -1 or not self._values.heeds():
            return found
        return fitted(found, self._values.counted(len(found), max(tensor.numel(), 1) * max(mask.numel(), 1)))

    def _counting(self, original: Callable[..., Any], dim: int) -> Callable[..., Any]:
        def counting(keys: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            values = self._values
            if torch._C._current_graph_task_id() != -1 or not values.heeds():
                return original(keys, tensor, *args, **kwargs)
            if values.replaying:
                # The output_size that the script passes fits the recorded values, not those that tensors have in a
                # replay.
                kwargs.pop("output_size", None)
            found = original(keys, tensor, *args, **kwargs)
            return fitted(found, values.counted(found.shape[dim], _MOST), dim)

        return counting

    def _by_index(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of `masked_select` for a process that replays, which selects by an index. The backward
        of the original would count the mask's elements again."""

        @functools.wraps(original)
        def masked_select(input: torch.Tensor, mask: torch.Tensor, **kwargs: torch.Tensor) -> Any:
            values = self._values
            if torch._C._current_graph_task_id() != -1 or not values.heeds():
                return original(input, mask, **kwargs)
            with values.aside():
                if not values.replaying:
                    found = original(input, mask, **kwargs)
                    values.counted(len(found), 0)
                    return found
                every, chosen = (each.reshape(-1) for each in torch.broadcast_tensors(input, mask))  # type: ignore[no-untyped-call]
                rows = chosen.nonzero()[:, 0]
            found = every[fitted(rows, values.counted(len(rows), len(chosen)))]
            return kwargs["out"].resize_(found.shape).copy_(found) if "out" in kwargs else found

        return masked_select

    def _unique(self, original: Callable[..., Any], argument: int | None) -> Callable[..., Any]:
        @functools.wraps(original)
        def unique(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            values = self._values
            if torch._C._current_graph_task_id() != -1 or not values.heeds() or _traced(tensor):
                return original(tensor, *args, **kwargs)
            with values.aside():
                found, places, counts = original(tensor, *args, **kwargs)
            dim = (args[0] if args else kwargs["dim"]) if argument else kwargs.get("dim")
            dim = 0 if dim is None else dim
            count = values.counted(found.shape[dim], max(tensor.numel(), found.shape[dim]))
            if not values.replaying:
                return found, places, counts
            places = places.remainder(count) if count else places
            return fitted(found, count, dim), places, fitted(counts, count) if counts.numel() else counts

        return unique


def _traced(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has no values (a fake tensor), or its operations are being traced into a graph."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not plain or torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def fitted(found: torch.Tensor, count: int, dim: int = 0) -> torch.Tensor:
    """Return the tensor with its size along dimension `dim` changed to `count`: slices are left out at the end, or
    repeated from the first on. If there are none, return zeros."""
    there = found.shape[dim]
    if there == count:
        return found
    if not there:
        return found.new_zeros([*found.shape[:dim], count, *found.shape[dim:][1:]])
    return found.index_select(dim, torch.arange(count, dtype=torch.int64, device=found.device) % there)
