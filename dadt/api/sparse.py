"""Allreduce of sparse tensors: gathers the ranks' entries, or reduces the tensors as dense ones if this transfers fewer
bytes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from math import prod
from typing import TYPE_CHECKING

import torch

from dadt.api.lifecycle import among_of
from dadt.comm.collectives import operation
from dadt.comm.collectives.operation import Operation
from dadt.comm.collectives.process_set import Handle
from dadt.errors import CommTimeout

if TYPE_CHECKING:
    from torch import Tensor

    from dadt.comm.collectives.process_set import ProcessSet

_HALF = (torch.float16, torch.bfloat16)


def coo_all_reduce(
    tensor: Tensor, reduction: str = "mean", *, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """Return the sum or mean of the sparse tensors of all ranks, bit-identical on every rank.

    tensor: a torch.sparse_coo tensor, coalesced or not, with the same shape, dtype and number of sparse dimensions on
    all ranks. Indices may differ, and a tensor may have none. reduction: mean or sum. Returns a coalesced tensor with
    all indices that any rank has. The entries of all ranks are gathered and summed in rank order; if together they take
    more memory than the dense tensor, the dense tensor is reduced instead. Raises TypeError for another layout and
    ValueError for another reduction.
    """
    return _prepare(tensor, reduction, name, process_set)()


def coo_all_reduce_async(
    tensor: Tensor, reduction: str = "mean", *, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[Tensor]:
    """Start to sum or average the sparse tensors of all ranks, and return a handle for the result."""
    return Handle(among_of(process_set), _Later(_prepare(tensor, reduction, name, process_set)))


class _Later:
    """Runs a function in a thread of its own, because a sparse allreduce needs two exchanges, and the second one
    depends on the result of the first."""

    def __init__(self, action: Callable[[], Tensor]) -> None:
        self._future: Future[Tensor] = Future()
        # The thread is a daemon, so that waiting for a peer that never answers does not keep the process from ending.
        threading.Thread(target=self._run, args=(action,), name="dadt-sparse", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float) -> Tensor:
        if not wait([self._future], None if timeout == math.inf else timeout).done:
            raise CommTimeout(f"coo_all_reduce was not done within {timeout:g} s")
        return self._future.result()

    def _run(self, action: Callable[[], Tensor]) -> None:
        try:
            self._future.set_result(action())
        except BaseException as error:  # noqa: BLE001 (raised in `wait`, whose caller would otherwise wait forever)
            self._future.set_exception(error)


def _prepare(tensor: Tensor, reduction: str, name: str | None, process_set: ProcessSet | None) -> Callable[[], Tensor]:
    """Start a sparse allreduce, and return a function that waits for the allreduce and returns its result."""
    among = among_of(process_set)
    if tensor.layout != torch.sparse_coo:
        raise TypeError(
            f"coo_all_reduce: the tensor is {tensor.layout}; give a torch.sparse_coo one, or see all_reduce"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"coo_all_reduce: reduction {reduction}: choose mean or sum")
    mine = _Entries(tensor.detach().coalesce())
    name = among.name(name)
    count = torch.tensor([mine.values.shape[0]], dtype=torch.int64, device="cpu")
    signature = f"coo_all_reduce {reduction} {mine.describe()}"
    gathered = among.submit(_gather(count, signature, among.size), name)

    def finish() -> Tensor:
        total = int(torch.cat(gathered.wait()).sum())
        exchange = _reduce_dense if total * mine.entry_bytes > mine.dense_bytes else _gather_entries
        result: Tensor = exchange(among, mine, reduction, name).to(tensor.device)
        return result

    return finish


class _Entries:
    """The entries of a coalesced sparse tensor, sorted by `flat`, the index of each entry as a single number (row-major
    order). Each entry has a value, or a row of values."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.sparse = self.shape[: tensor.sparse_dim()]
        self.dtype = tensor.dtype
        self.values = tensor.values().cpu()
        indices = tensor.indices().cpu()
        self.flat = torch.zeros(indices.shape[1], dtype=torch.int64, device="cpu")
        for size, row in zip(self.sparse, indices, strict=True):
            self.flat = self.flat * size + row

    @property
    def entry_bytes(self) -> int:
        return 8 + prod(self.shape[len(self.sparse) :]) * self.dtype.itemsize

    @property
    def dense_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def describe(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {list(self.shape)} with {len(self.sparse)} sparse dimensions"

    def tensor(self, flat: Tensor, values: Tensor) -> Tensor:
        """Return a sparse tensor with the shape and dtype of this one, whose entries have the given values. flat: the
        index of each entry as a single number (row-major order)."""
        indices = torch.stack(torch.unravel_index(flat, self.sparse)) if self.sparse else flat.new_zeros((0, len(flat)))
        return torch.sparse_coo_tensor(
            indices,
            values.to(self.dtype),
            self.shape,
            dtype=self.dtype,
            device="cpu",
            is_coalesced=True,
            check_invariants=False,
        )


def _gather_entries(among: ProcessSet, mine: _Entries, reduction: str, name: str) -> Tensor:
    handles = [
        among.submit(_gather(values, f"{what} of coo_all_reduce {mine.describe()}", among.size), f"{name}, {what}")
        for what, values in (("indices", mine.flat), ("values", mine.values))
    ]
    flats, values = (handle.wait() for handle in handles)
    union, places = torch.unique(torch.cat(flats), return_inverse=True)
    # 16-bit floats are summed in float32, as in an allreduce of dense tensors.
    wide = torch.float32 if mine.dtype in _HALF else mine.dtype
    total = torch.zeros((len(union), *mine.values.shape[1:]), dtype=wide, device="cpu")
    for place, rows in zip(places.split([len(f) for f in flats]), values, strict=True):
        # an indexed += would add a repeated index only once, but the indices of one rank are all different
        total[place] += rows
    if reduction == "mean":
        total = total / among.size if wide.is_floating_point or wide.is_complex else _truncated(total, among.size)
    return mine.tensor(union, total)


def _reduce_dense(among: ProcessSet, mine: _Entries, reduction: str, name: str) -> Tensor:
    """Reduce sparse tensors as dense ones. Also reduces a flag for each index that says whether any rank has an entry
    at this index, since the entries of an index may add up to zero."""
    dense = torch.zeros((prod(mine.sparse), *mine.values.shape[1:]), dtype=mine.dtype, device="cpu")
    there = torch.zeros(prod(mine.sparse), dtype=torch.bool, device="cpu")
    dense[mine.flat] = mine.values
    there[mine.flat] = True
    calls = (
        operation.all_reduce(dense, dense, reduction, among.size),
        operation.all_reduce(there, there, "max", among.size),
    )
    for handle in [among.submit(call, f"{name}, dense {i}") for i, call in enumerate(calls)]:
        handle.wait()
    union = there.nonzero().flatten()
    return mine.tensor(union, dense[union])


def _gather(tensor: Tensor, signature: str, size: int) -> Operation:
    call = operation.all_gather(tensor, size)
    call.signature = signature
    return call


def _truncated(total: Tensor, size: int) -> Tensor:
    return torch.div(total, size, rounding_mode="trunc")
