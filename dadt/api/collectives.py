"""`import dadt` joins the job, tells each process its rank and exchanges tensors by name. The operations are those of
MPI and of Horovod, some under other names: see "From Horovod". "Exascale Deep Learning for Scientific Inverse
Problems" (arXiv 1909.11150) describes how tensors are matched across ranks.

Every operation takes `name` and `process_set`. Calls with the same name belong together, in any order and from any
thread; a name may be used again once its call is done. Calls without a name are numbered, so all ranks of the set must
make them in the same order. Rank numbers are always those of the job, even within a process set. Tensors may have any
dtype, memory layout and device; results are new tensors on the device of the input. An operation whose name ends in
`_async` returns a handle at once.

If ranks disagree on the dtype, shape, root or operation under a name, all of them raise the same `dadt.Mismatch`, which
names both sides. A lost rank raises `PeerLost`, and a wait longer than `--timeout` raises `CommTimeout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dadt.api.blocking import blocking, started
from dadt.api.lifecycle import among_of, root_of, session
from dadt.comm.collectives import operation
from dadt.comm.collectives.operation import Operation
from dadt.comm.collectives.process_set import Handle, Handles, ProcessSet
from dadt.comm.collectives.serialize import pack, unpack

if TYPE_CHECKING:
    from torch import Tensor

# Allreduce ------------------------------------------------------------------------------------------------------------


@blocking
def all_reduce(
    tensor: Tensor, reduction: str = "mean", *, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[Tensor]:
    """Reduce the tensors of all ranks. The result is bit-identical on every rank.

    tensor: same dtype and shape on all ranks. reduction: mean, sum, min, max or product; band, bor or bxor for
    integers. The mean of integers is truncated; the sum of bools is their logical or, the product their logical and.
    Returns a tensor of the same shape. Raises TypeError or ValueError for a tensor that cannot be reduced this way.
    """
    return _all_reduce(tensor, _like(tensor), reduction, name, process_set)


all_reduce_async = started(all_reduce)


@blocking
def all_reduce_(
    tensor: Tensor, reduction: str = "mean", *, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[Tensor]:
    """Reduce the tensors of all ranks, overwrite this rank's tensor with the result, and return the tensor."""
    return _all_reduce(tensor, tensor, reduction, name, process_set)


all_reduce_async_ = started(all_reduce_)


@blocking
def grouped_all_reduce(
    tensors: Sequence[Tensor],
    reduction: str = "mean",
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[list[Tensor]]:
    """All-reduce a group of tensors together. No data is sent before every rank has submitted the whole group.

    tensors: same number, dtypes and shapes on all ranks. They are fused up to `group_buffer_size` bytes.
    """
    return _grouped(tensors, [_like(t) for t in tensors], reduction, name, process_set)


grouped_all_reduce_async = started(grouped_all_reduce)


@blocking
def grouped_all_reduce_(
    tensors: Sequence[Tensor],
    reduction: str = "mean",
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[list[Tensor]]:
    """All-reduce a group of tensors together, overwrite the tensors with the results, and return them."""
    return _grouped(tensors, tensors, reduction, name, process_set)


def join(process_set: ProcessSet | None = None) -> int:
    """Report to the other ranks that this rank has no more data, and wait, without a time limit, until all ranks have
    joined.

    Use `join` when ranks have unequal numbers of batches, as with Horovod's join. A rank that has joined adds nothing
    to the allreduces of the other ranks, and their means are over the ranks that have not joined. Other operations fail
    while any rank has joined. Returns the last rank to join, the same on all ranks; after that, all ranks take part
    again.
    """
    among = among_of(process_set)
    ticket = among.named.join()
    with among.naming_ranks():
        ticket.wait(float("inf"))
    among.joined()
    return among.ranks[ticket.last_joined]


# Broadcast, gather, reduce and scatter: one rank is the root ----------------------------------------------------------


@blocking
def broadcast(
    tensor: Tensor,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    root_rank: int | None = None,
) -> Handle[Tensor]:
    """Return the root's tensor on all ranks.

    tensor: same dtype and shape on all ranks. root_rank: Horovod's name for root.
    """
    among, root = among_of(process_set), root_of(root, root_rank)
    output = tensor.detach().clone() if among.rank == among.number_of(root, "root") else _like(tensor)
    return _broadcast(among, output, root, name)


broadcast_async = started(broadcast)


@blocking
def broadcast_(
    tensor: Tensor,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    root_rank: int | None = None,
) -> Handle[Tensor]:
    """Overwrite the tensor on all ranks with the root's tensor, and return it."""
    return _broadcast(among_of(process_set), tensor, root_of(root, root_rank), name)


broadcast_async_ = started(broadcast_)


@blocking
def reduce(
    tensor: Tensor,
    root: int = 0,
    reduction: str = "mean",
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[Tensor | None]:
    """Reduce the tensors of all ranks. Returns the result on the root, and None on the other ranks."""
    among = among_of(process_set)
    number = among.number_of(root, "root")
    output = _like(tensor)
    call = operation.reduce(tensor, output, reduction, number, among.rank, among.size)
    return among.submit(call, name, lambda _: output if among.rank == number else None)


reduce_async = started(reduce)


@blocking
def gather(
    tensor: Tensor, root: int = 0, *, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[list[Tensor] | None]:
    """Return a list of every rank's tensor, by rank, on the root, and None on the other ranks. Tensors have the same
    dtype and number of dimensions on all ranks; only the first dimension may differ in size."""
    among = among_of(process_set)
    call = operation.gather(tensor, among.number_of(root, "root"), among.rank, among.size)
    return among.submit(call, name, lambda received: None if received is None else _shaped(received, tensor))


gather_async = started(gather)


@blocking
def scatter(
    tensors: Sequence[Tensor] | None,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[Tensor]:
    """Return the tensor that the root passes for this rank.

    tensors: on the root one per rank, of any dtypes and shapes; ignored on the other ranks, which receive their tensors
    in host memory. Raises ValueError on the root for any other number of tensors.
    """
    among = among_of(process_set)
    number = among.number_of(root, "root")
    call = Operation("scatter", f"scatter from rank {number}", "exchange")
    call.sends = [(0, 0)] * among.size
    if among.rank == number:
        if tensors is None or len(tensors) != among.size:
            raise ValueError(f"scatter: give the root {among.size} tensors, one for each rank")
        call.keep = [pack(t) for t in tensors]
        call.sends = [(p.data_ptr(), p.numel()) for p in call.keep]
    call.finish = lambda work: unpack(work.received[number])
    return among.submit(call, name)


scatter_async = started(scatter)


# Collectives in which every rank receives from every rank -------------------------------------------------------------


@blocking
def all_gather(
    tensor: Tensor, *, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[list[Tensor]]:
    """Return every rank's tensor, by rank. Horovod's allgather returns the torch.cat of these.

    tensor: same dtype and number of dimensions on all ranks; only the first dimension may differ in size.
    """
    among = among_of(process_set)
    return among.submit(operation.all_gather(tensor, among.size), name, lambda received: _shaped(received, tensor))


all_gather_async = started(all_gather)


@blocking
def all_to_all(
    tensors: Sequence[Tensor], *, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[list[Tensor]]:
    """Send tensors[r] to the r-th rank of the set. Returns the tensors that the ranks have sent to this rank, ordered
    by rank.

    tensors: one per rank, all of one dtype; empty ones are allowed, and only the first dimension may differ in size.
    Raises ValueError for any other number of tensors.
    """
    among = among_of(process_set)
    return among.submit(operation.all_to_all(tensors, among.size), name)


all_to_all_async = started(all_to_all)


@blocking
def reduce_scatter(
    tensors: Sequence[Tensor],
    reduction: str = "mean",
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[Tensor]:
    """Reduce tensors[r] of all ranks, and return the result on the r-th rank of the set.

    tensors: one per rank, all of one dtype, with the same shapes on all ranks. reduction: mean, sum, min, max or
    product; band, bor or bxor for integers.
    """
    among = among_of(process_set)
    if len(tensors) != among.size:
        raise ValueError(f"reduce_scatter: {len(tensors)} tensors for {among.size} ranks; give one for each")
    output = _like(tensors[among.rank])
    call = operation.reduce_scatter(tensors, output, reduction, among.rank, among.size)
    return among.submit(call, name, lambda _: output)


reduce_scatter_async = started(reduce_scatter)


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until all ranks of the process set have called `barrier`."""
    among = among_of(process_set)
    among.submit(operation.barrier(among.size), None).wait()


def local_barrier() -> None:
    """Wait until all ranks of this host have called `local_barrier`."""
    session().local_barrier()


# Handles of operations under way --------------------------------------------------------------------------------------


def synchronize(handle: Handle[Any]) -> Any:
    """Wait for a handle and return its result."""
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Return whether the operation is done, so that waiting for its handle would not block."""
    return handle.done


# Helpers of the operations above --------------------------------------------------------------------------------------


def _all_reduce(
    tensor: Tensor, output: Tensor, reduction: str, name: str | None, process_set: ProcessSet | None
) -> Handle[Any]:
    among = among_of(process_set)
    return among.submit(operation.all_reduce(tensor, output, reduction, among.size), name, lambda _: output)


def _grouped(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    reduction: str,
    name: str | None,
    process_set: ProcessSet | None,
) -> Handles:
    among = among_of(process_set)

    def reduced(tensor: Tensor, output: Tensor) -> Any:
        return operation.all_reduce(tensor, output, reduction, among.size), lambda _: output

    return among.submit_group(list(map(reduced, tensors, outputs)), among.name(name))


def _broadcast(among: ProcessSet, tensor: Tensor, root: int, name: str | None) -> Handle[Any]:
    call = operation.broadcast(tensor, among.number_of(root, "root"), among.rank, among.size)
    return among.submit(call, name, lambda _: tensor)


def _like(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        raise TypeError(f"the tensor is {tensor.layout}: give a dense one, or see coo_all_reduce")
    return torch.empty_like(tensor, requires_grad=False)


def _shaped(received: Sequence[Tensor], tensor: Tensor) -> list[Tensor]:
    return [each.reshape(()) for each in received] if tensor.dim() == 0 else list(received)
