"""Operations that wait for their result and support autograd.

Gradients are those that Horovod defines: the gradient of a reduction is reduced in the same way; the gradient of a
tensor that was gathered, broadcast or scattered is the average, or the sum, of the gradients on the ranks that received
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function

from dadt.frontends.horovod.torch import arguments, operations, place
from dadt.frontends.horovod.torch.arguments import ReduceArguments, takes
from dadt.frontends.horovod.torch.operations import synchronize
from dadt.frontends.horovod.torch.process_sets import ProcessSet, global_process_set
from dadt.frontends.horovod.torch.reduce_op import ReduceOp

if TYPE_CHECKING:
    from torch import Tensor


def _applied(function: Any, *arguments: Any) -> Any:
    """Call `apply` of an autograd Function, for which torch has no type annotations."""
    return function.apply(*arguments)


def _compressed(function: Any, tensors: Sequence[Tensor], asked: ReduceArguments, *, grouped: bool) -> list[Tensor]:
    """Compress the tensors, call `apply` of an autograd Function that reduces them, and return the decompressed
    results. grouped: whether the tensors form a group, even if there is only one."""
    sent = [asked.compression.compress(t) for t in tensors]
    results = _applied(function, asked, grouped, *(t for t, _ in sent))
    return [asked.compression.decompress(t, context) for t, (_, context) in zip(results, sent, strict=True)]


# Allreduce ------------------------------------------------------------------------------------------------------------


class _Allreduce(Function):
    @staticmethod
    def forward(ctx: Any, asked: ReduceArguments, grouped: bool, *tensors: Tensor) -> Any:
        ctx.asked, ctx.grouped, outputs = asked, grouped, [torch.empty_like(t) for t in tensors]
        if grouped:
            return tuple(synchronize(operations.start_grouped_allreduce(tensors, outputs, asked)))
        return (synchronize(operations.start_allreduce(tensors[0], outputs[0], asked)),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *_applied(_Allreduce, replace(ctx.asked, name=None), ctx.grouped, *gradients)


@takes(arguments.COMPRESSED_ALLREDUCE)
def allreduce(tensor: Tensor, asked: ReduceArguments) -> Tensor:
    """Return the reduction of the tensors of all ranks: a new tensor of the same shape and dtype."""
    return _compressed(_Allreduce, [tensor], asked, grouped=False)[0]


@takes(arguments.ALLREDUCE)
def allreduce_(tensor: Tensor, asked: ReduceArguments) -> Tensor:
    """Reduce the tensors of all ranks, overwrite this rank's tensor with the result, and return it."""
    result: Tensor = synchronize(operations.start_allreduce(tensor, tensor, asked))
    return result


@takes(arguments.COMPRESSED_ALLREDUCE)
def grouped_allreduce(tensors: Sequence[Tensor], asked: ReduceArguments) -> list[Tensor]:
    """Reduce several tensors over all ranks, and return the results: new tensors of the same shapes and dtypes."""
    return _compressed(_Allreduce, tensors, asked, grouped=True)


@takes(arguments.ALLREDUCE)
def grouped_allreduce_(tensors: Sequence[Tensor], asked: ReduceArguments) -> list[Tensor]:
    """Reduce several tensors over all ranks, overwrite them with the results, and return them."""
    results: list[Tensor] = synchronize(operations.start_grouped_allreduce(tensors, tensors, asked))
    return results


# Allgather ------------------------------------------------------------------------------------------------------------


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, grouped: bool, *tensors: Tensor) -> Any:
        ctx.shapes, ctx.process_set = [t.shape for t in tensors], process_set
        if grouped:
            return tuple(synchronize(operations.grouped_allgather_async(tensors, name, process_set)))
        return (synchronize(operations.allgather_async(tensors[0], name, process_set)),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradient of an allgather: return this rank's rows of the gradients, averaged over all ranks."""
        ranks = ctx.process_set
        averages = grouped_allreduce(gradients, op=ReduceOp.Average, process_set=ranks)
        mine = [shape[0] if shape else 1 for shape in ctx.shapes]
        counts = _all_counts(mine, ranks)[: ranks.rank()].sum(0).tolist()
        rows = zip(averages, counts, mine, ctx.shapes, strict=True)
        return (None, None, None, *(t.narrow(0, before, count).reshape(shape) for t, before, count, shape in rows))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return the tensors of all ranks, joined along their first dimension by rank."""
    result: Tensor = _applied(_Allgather, name, process_set, False, tensor)[0]
    return result


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather each of several tensors from all ranks. Returns, for each, the ranks' tensors joined along their first
    dimension."""
    return list(_applied(_Allgather, name, process_set, True, *tensors))


def _all_counts(mine: Sequence[int], process_set: ProcessSet) -> Tensor:
    """Gather the numbers of rows that each rank has of several tensors. Returns a matrix with a row for each rank."""
    row = torch.tensor([list(mine)], dtype=torch.int64, device="cpu")
    counts: Tensor = synchronize(operations.allgather_async(row, None, process_set))
    return counts


# Broadcast ------------------------------------------------------------------------------------------------------------


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(operations.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradient of a broadcast: return the average of all ranks' gradients on the root, and zeros on the other
        ranks."""
        average = allreduce(gradients[0], op=ReduceOp.Average, process_set=ctx.process_set)
        return average if place.rank() == ctx.root_rank else torch.zeros_like(average), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the root's tensor on all ranks. root_rank: a rank of the whole job, also in a process set."""
    result: Tensor = _applied(_Broadcast, tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite the tensor on all ranks with the root's tensor, and return it."""
    result: Tensor = synchronize(operations.broadcast_async_(tensor, root_rank, name, process_set))
    return result


# Alltoall and reducescatter -------------------------------------------------------------------------------------------


class _Alltoall(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        ctx.rows, ctx.process_set = len(tensor) if tensor.dim() else 0, process_set
        output, ctx.counts = synchronize(operations.alltoall_async(tensor, splits, name, process_set))
        ctx.mark_non_differentiable(ctx.counts)
        return output, ctx.counts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradient of an all-to-all: send the gradient of each row back to the rank that sent the row. The gradient of
        rows that were not sent is zero."""
        back, _ = alltoall(gradients[0], ctx.counts, process_set=ctx.process_set)
        rest = back.new_zeros((ctx.rows - len(back), *back.shape[1:]))
        return torch.cat([back, rest]) if len(rest) else back, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send slices of the tensor to all ranks. Returns the received rows; with splits, also the number of rows from each
    rank."""
    output, counts = _applied(_Alltoall, tensor, splits, name, process_set)
    return output if splits is None else (output, counts)


class _Reducescatter(Function):
    @staticmethod
    def forward(ctx: Any, asked: ReduceArguments, grouped: bool, *tensors: Tensor) -> Any:
        ctx.asked, ctx.grouped = asked, grouped
        if grouped:
            return tuple(synchronize(operations.start_grouped_reducescatter(tensors, asked)))
        return (synchronize(operations.start_reducescatter(tensors[0], asked)),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        asked: ReduceArguments = ctx.asked
        ranks = asked.process_set.among.size if asked.reduction is ReduceOp.Sum else 1
        factor = asked.prescale_factor * asked.postscale_factor * ranks
        whole = _applied(_Allgather, None, asked.process_set, ctx.grouped, *(g * factor for g in gradients))
        return None, None, *whole


@takes(arguments.COMPRESSED_REDUCESCATTER)
def reducescatter(tensor: Tensor, asked: ReduceArguments) -> Tensor:
    """Reduce the tensors of all ranks, and return this rank's part of the result: a slice of its first dimension."""
    return _compressed(_Reducescatter, [tensor], asked, grouped=False)[0]


@takes(arguments.COMPRESSED_REDUCESCATTER)
def grouped_reducescatter(tensors: Sequence[Tensor], asked: ReduceArguments) -> list[Tensor]:
    """Reduce several tensors over all ranks, and return this rank's part of each result: a slice of its first
    dimension."""
    return _compressed(_Reducescatter, tensors, asked, grouped=True)
