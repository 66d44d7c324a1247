"""Horovod's operations that return handles at once. Operations that wait for their result are in `gradients.py`.

Calls of the same operation with the same name belong together. Calls without a name are numbered, so all ranks make
them in the same order. `synchronize` waits for a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from dadt.api import collectives, sparse
from dadt.comm.collectives import operation
from dadt.comm.collectives.operation import Operation
from dadt.comm.collectives.process_set import Handle, Handles
from dadt.errors import DadtError
from dadt.frontends.horovod.errors import HorovodInternalError, horovods
from dadt.frontends.horovod.torch import adasum
from dadt.frontends.horovod.torch.arguments import ALLREDUCE, REDUCESCATTER, ReduceArguments, takes
from dadt.frontends.horovod.torch.process_sets import ProcessSet, global_process_set
from dadt.frontends.horovod.torch.reduce_op import REDUCTIONS, ReduceOp, chosen, factor_of, scale_, scale_all_, scaled

if TYPE_CHECKING:
    from torch import Tensor

    from dadt.comm.collectives.process_set import ProcessSet as Ranks

    Prepared = tuple[Operation, Callable[[Any], Any] | None]
    """An operation of DADT's core, and the function that computes the caller's result from the result of this
    operation; None in place of the function if both results are equal."""


# Allreduce ------------------------------------------------------------------------------------------------------------


@takes(ALLREDUCE)
def allreduce_async(tensor: Tensor, asked: ReduceArguments) -> Handle[Tensor]:
    """Start to reduce the tensors of all ranks; the result is a new tensor of the same shape and dtype.

    average: deprecated in favour of op. op: Average (the default), Sum, Adasum, Min, Max or Product. prescale_factor,
    postscale_factor: factors before and after the reduction; averages of integers are truncated.
    """
    return start_allreduce(tensor, torch.empty_like(tensor, requires_grad=False), asked)


@takes(ALLREDUCE)
def allreduce_async_(tensor: Tensor, asked: ReduceArguments) -> Handle[Tensor]:
    """Start to reduce the tensors of all ranks, and return a handle. The result overwrites this rank's tensor."""
    return start_allreduce(tensor, tensor, asked)


@takes(ALLREDUCE)
def grouped_allreduce_async(tensors: Sequence[Tensor], asked: ReduceArguments) -> Handles:
    """Start to reduce several tensors over all ranks, and return a handle for all results. Nothing is sent before every
    rank has submitted all of the tensors."""
    return start_grouped_allreduce(tensors, [torch.empty_like(t, requires_grad=False) for t in tensors], asked)


@takes(ALLREDUCE)
def grouped_allreduce_async_(tensors: Sequence[Tensor], asked: ReduceArguments) -> Handles:
    """Start to reduce several tensors over all ranks, and return a handle for all results, which overwrite the
    tensors."""
    return start_grouped_allreduce(tensors, tensors, asked)


def allreduce_together_(
    tensors: Sequence[Tensor], name: str, op: ReduceOp, factors: tuple[float, float], process_set: ProcessSet
) -> Handle[Sequence[Tensor]]:
    """Start to reduce several tensors of one dtype in place, in a single operation, which costs less than an operation
    for each tensor. Adasum is not supported."""

    def prepare(among: Ranks) -> Prepared:
        sources = [scaled(t, factors[0]) for t in tensors]
        call = operation.all_reduce_together(sources, tensors, REDUCTIONS[op])
        call.signature = _signature(call.signature, op, factors)
        factor = factor_of(op, factors[1], among.size)
        return call, lambda _: scale_all_(tensors, factor)

    return _submit("gradients", name, process_set, prepare)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to sum or average the sparse tensors of all ranks. Returns a function that waits for the result, a
    coalesced tensor.

    op: Average or Sum. Raises ValueError for other reductions.
    """
    wanted = chosen(op, None)
    if wanted not in (ReduceOp.Average, ReduceOp.Sum):
        raise ValueError(f"sparse_allreduce_async: op {wanted.name}: choose Average or Sum")
    with horovods():
        reduction = "mean" if wanted is ReduceOp.Average else "sum"
        handle = sparse.coo_all_reduce_async(
            tensor, reduction, name=_named("sparse_allreduce", name), process_set=process_set.among
        )
    return lambda: synchronize(handle)


# Collectives in which every rank receives from every rank -------------------------------------------------------------


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Start to concatenate the tensors of all ranks, by rank, along the first dimension, which may differ in size."""
    return _submit("allgather", name, process_set, lambda among: _allgather(tensor, among))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handles:
    """Start to gather several tensors from all ranks, and return a handle for all results. Nothing is sent before every
    rank has submitted all of the tensors."""
    return _submit_group("allgather", name, process_set, lambda among: [_allgather(t, among) for t in tensors])


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Start to copy the root's tensor into a new tensor on all ranks. root_rank: a rank of the whole job, also in a
    process set."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Start to overwrite the tensor on all ranks with the root's tensor, and return a handle."""

    def prepare(among: Ranks) -> Prepared:
        root = among.number_of(root_rank, "root_rank")
        return operation.broadcast(tensor, root, among.rank, among.size), lambda _: tensor

    return _submit("broadcast", name, process_set, prepare)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[Tensor, Tensor]]:
    """Start to send slices of the tensor to all ranks. The result is the received rows, by rank, and the number of rows
    from each rank.

    splits: the number of rows for each rank, whole numbers; by default all ranks get the same number. Raises ValueError
    unless there is a number for each rank and the tensor has enough rows.
    """

    def prepare(among: Ranks) -> Prepared:
        rows = _rows(tensor, splits, among.size)
        slices = list(torch.split(tensor.detach()[: sum(rows)], rows))
        like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")

        def finish(received: list[Tensor]) -> tuple[Tensor, Tensor]:
            counts = torch.tensor([len(each) for each in received], dtype=like.dtype, device=like.device)
            return torch.cat(received), counts

        return operation.all_to_all(slices, among.size), finish

    return _submit("alltoall", name, process_set, prepare)


@takes(REDUCESCATTER)
def reducescatter_async(tensor: Tensor, asked: ReduceArguments) -> Handle[Tensor]:
    """Start to reduce the tensors of all ranks and to give each rank its part of the result.

    Parts are slices of the first dimension, by rank; if the dimension cannot be divided evenly, the first ranks get one
    row more. op: Average (the default), Sum, Min, Max or Product.
    """
    return start_reducescatter(tensor, asked)


@takes(REDUCESCATTER)
def grouped_reducescatter_async(tensors: Sequence[Tensor], asked: ReduceArguments) -> Handles:
    """Start to reduce several tensors over all ranks and to give each rank its parts of the results. Nothing is sent
    before every rank has submitted all of the tensors."""
    return start_grouped_reducescatter(tensors, asked)


# Handles of operations, barrier and join ------------------------------------------------------------------------------


def synchronize(handle: Handle[Any]) -> Any:
    """Wait for an operation and return its result. Raises HorovodInternalError if it failed."""
    with horovods():
        return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Return whether an operation is done, so that `synchronize` would return its result without waiting."""
    if handle.done:
        with suppress(DadtError):  # an error of the operation is raised by `synchronize`, not by `poll`
            handle.wait(0.0)
    return handle.done


def join(device: int = -1) -> int:
    """Report that this rank has no more data, and wait until all ranks have reported this.

    Meanwhile this rank counts as zeros in the averages and sums of the other ranks, and other operations fail. Returns
    the last rank to join. device: accepted for scripts written for Horovod, and not used.
    """
    with horovods():
        return collectives.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called `barrier`."""
    synchronize(_submit("barrier", None, process_set, lambda among: (operation.barrier(among.size), None)))


# Helpers of the operations above --------------------------------------------------------------------------------------


def _named(verb: str, name: str | None) -> str | None:
    """Return the name with the kind of operation as prefix, since operations of different kinds may have the same
    name."""
    return None if name is None else f"{verb}.{name}"


def _submit(verb: str, name: str | None, process_set: ProcessSet, prepare: Callable[[Ranks], Prepared]) -> Handle[Any]:
    with horovods():
        among = process_set.among
        call, finish = prepare(among)
        return among.submit(call, _named(verb, name), finish)


def _submit_group(
    verb: str, name: str | None, process_set: ProcessSet, prepare: Callable[[Ranks], list[Prepared]]
) -> Handles:
    with horovods():
        among = process_set.among
        group = f"grouped_{verb}.{among.name(name)}"
        return among.submit_group(prepare(among), group)


def start_allreduce(tensor: Tensor, output: Tensor, asked: ReduceArguments) -> Handle[Tensor]:
    """Start an allreduce of `tensor` that writes its result to `output`, which may be the same tensor."""
    return _submit("allreduce", asked.name, asked.process_set, lambda among: _reduced(tensor, output, asked, among))


def start_grouped_allreduce(tensors: Sequence[Tensor], outputs: Sequence[Tensor], asked: ReduceArguments) -> Handles:
    """Start one allreduce for several tensors, each with an output of its own. Raises ValueError if the tensors are on
    both CPU and GPU."""
    if len({t.device.type == "cpu" for t in tensors}) > 1:
        raise ValueError("grouped_allreduce: give tensors of one kind of device")
    pairs = list(zip(tensors, outputs, strict=True))
    return _submit_group(
        "allreduce", asked.name, asked.process_set, lambda among: [_reduced(*pair, asked, among) for pair in pairs]
    )


def start_reducescatter(tensor: Tensor, asked: ReduceArguments) -> Handle[Tensor]:
    """Start a reduce-scatter of the tensor: the result is this rank's part of the reduced tensor."""
    return _submit("reducescatter", asked.name, asked.process_set, lambda among: _reducescatter(tensor, asked, among))


def start_grouped_reducescatter(tensors: Sequence[Tensor], asked: ReduceArguments) -> Handles:
    """Start one reduce-scatter for several tensors: the results are this rank's parts of the reduced tensors."""
    return _submit_group(
        "reducescatter", asked.name, asked.process_set, lambda among: [_reducescatter(t, asked, among) for t in tensors]
    )


def _reduced(tensor: Tensor, output: Tensor, asked: ReduceArguments, among: Ranks) -> Prepared:
    op, pre, post = asked.reduction, asked.prescale_factor, asked.postscale_factor
    source = scaled(tensor, pre)
    if op is ReduceOp.Adasum:
        call, combine = adasum.prepare(source, among)
        return call, lambda received: scale_(operation.deliver(combine(received), output), post)
    call = operation.all_reduce(source, output, REDUCTIONS[op], among.size)
    call.signature = _signature(call.signature, op, (pre, post))
    factor = factor_of(op, post, among.size)
    return call, lambda _: scale_(output, factor)


def _reducescatter(tensor: Tensor, asked: ReduceArguments, among: Ranks) -> Prepared:
    op, pre, post = asked.reduction, asked.prescale_factor, asked.postscale_factor
    if op is ReduceOp.Adasum:
        raise NotImplementedError("reducescatter: Adasum is not supported")
    if tensor.dim() == 0:
        raise HorovodInternalError("reducescatter: give a tensor of one or more dimensions; a scalar has no parts")
    parts = list(torch.split(scaled(tensor.detach(), pre), _shares(len(tensor), among.size)))
    output = torch.empty_like(parts[among.rank], memory_format=torch.contiguous_format)
    call = operation.reduce_scatter(parts, output, REDUCTIONS[op], among.rank, among.size)
    call.signature = _signature(call.signature, op, (pre, post))
    factor = factor_of(op, post, among.size)
    return call, lambda _: scale_(output, factor)


def _allgather(tensor: Tensor, among: Ranks) -> Prepared:
    """Prepare to gather tensors along their first dimension; a scalar counts as one row."""
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor
    return operation.all_gather(rows, among.size), torch.cat


def _signature(signature: str, op: ReduceOp, factors: tuple[float, float]) -> str:
    """Return a text that must be the same on all ranks: the signature of DADT's operation, with Horovod's op and
    factors added, since several of Horovod's reductions use the same operation of DADT."""
    return f"{signature} as {op.name} with factors {factors[0]:g}, {factors[1]:g}"


def _shares(rows: int, size: int) -> list[int]:
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _rows(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    """Return the number of rows of the tensor to send to each rank. Raises ValueError if `splits` does not fit the
    tensor and the number of ranks."""
    if tensor.dim() == 0:
        raise ValueError("alltoall: give a tensor of one or more dimensions")
    if splits is None:
        if len(tensor) % size:
            raise ValueError(f"alltoall: {len(tensor)} rows cannot be divided by {size} ranks; give splits")
        return [len(tensor) // size] * size
    if isinstance(splits, torch.Tensor) and (splits.is_floating_point() or splits.is_complex()):
        raise ValueError(f"alltoall: splits are {splits.dtype}; give whole numbers, such as torch.int32")
    rows = [int(each) for each in splits]
    if len(rows) != size:
        raise ValueError(f"alltoall: splits has {len(rows)} entries for {size} ranks; give one for each")
    if min(rows) < 0 or sum(rows) > len(tensor):
        raise ValueError(f"alltoall: splits {rows} ask for {sum(rows)} rows of {len(tensor)}")
    return rows
