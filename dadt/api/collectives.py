"""`import dadt`: start, tell who is who, and exchange tensors by name. The verbs are MPI's, and those of Horovod's
API under names of their own: see "From Horovod". How tensors are brought together is described in "Exascale Deep
Learning for Scientific Inverse Problems" (arXiv 1909.11150).

Every verb takes `name` and `process_set`. Calls with the same name belong together, in whatever order and from
whatever threads they come; a name may be used again once its call is done. Calls without a name are numbered, so these
must come in the same order on all ranks of the set. Ranks are always those of the job, also within a process set.
Tensors may be of any dtype, memory layout and device; results are new tensors on the device of what was given. A verb
whose name ends in `_async` returns a handle at once.

Where ranks disagree (another dtype, shape, root or verb under one name) each of them gets the same `dadt.Mismatch`,
which names both sides. A lost rank is a `PeerLost`, a wait that took longer than `--timeout` a `CommTimeout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dadt.api.lifecycle import among_of, root_of, session
from dadt.comm.collectives import operation
from dadt.comm.collectives.operation import Operation
from dadt.comm.collectives.process_set import Handle, Handles, ProcessSet
from dadt.comm.collectives.serialize import pack, unpack

if TYPE_CHECKING:
    from torch import Tensor

# Allreduce ------------------------------------------------------------------------------------------------------------


def all_reduce(
    tensor: Tensor, reduction: str = "mean", *, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """The reduction of all ranks' tensors, the same bits on each.

    tensor: of the same dtype and shape on all ranks. reduction: mean, sum, min, max, product; band, bor or bxor of
    whole numbers. Integers' mean is truncated; bools' sum is their or, their product their and. Returns a tensor of
    this shape. Raises TypeError and ValueError for what cannot be reduced so.
    """
    result: Tensor = all_reduce_async(tensor, reduction, name=name, process_set=process_set).wait()
    return result


def all_reduce_async(
    tensor: Tensor, reduction: str = "mean", *, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """As all_reduce; the handle gives the result."""
    return _all_reduce(tensor, _like(tensor), reduction, name, process_set)


def all_reduce_(
    tensor: Tensor, reduction: str = "mean", *, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """As all_reduce, in place: overwrites the tensor, and returns it."""
    result: Tensor = all_reduce_async_(tensor, reduction, name=name, process_set=process_set).wait()
    return result


def all_reduce_async_(
    tensor: Tensor, reduction: str = "mean", *, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """As all_reduce_; the tensor is overwritten once the handle was waited for."""
    return _all_reduce(tensor, tensor, reduction, name, process_set)


def grouped_all_reduce(
    tensors: Sequence[Tensor],
    reduction: str = "mean",
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """As all_reduce of each, all or none: nothing of the group moves before every rank has submitted all of it.

    tensors: as many, with the same dtypes and shapes, on all ranks. Fused up to `group_buffer_size` bytes.
    """
    return grouped_all_reduce_async(tensors, reduction, name=name, process_set=process_set).wait()


def grouped_all_reduce_async(
    tensors: Sequence[Tensor],
    reduction: str = "mean",
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handles:
    """As grouped_all_reduce; the handle gives the list."""
    return _grouped(tensors, [_like(t) for t in tensors], reduction, name, process_set)


def grouped_all_reduce_(
    tensors: Sequence[Tensor],
    reduction: str = "mean",
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """As grouped_all_reduce, in place."""
    return _grouped(tensors, tensors, reduction, name, process_set).wait()


def join(process_set: ProcessSet | None = None) -> int:
    """This rank has no more to reduce: it waits, and adds nothing to the others' allreduces, until all have joined.

    A mean is over the ranks that have not joined. Other verbs fail while a rank has. Returns the last rank that joined,
    the same on all; then everything starts anew. For ranks with unequal numbers of batches (as Horovod's join). Waits
    for as long as it takes.
    """
    among = among_of(process_set)
    ticket = among.named.join()
    with among.naming_ranks():
        ticket.wait(float("inf"))
    among.joined()
    return among.ranks[ticket.last_joined]


# Between one and all --------------------------------------------------------------------------------------------------


def broadcast(
    tensor: Tensor,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    root_rank: int | None = None,
) -> Tensor:
    """The root's tensor, on all ranks.

    tensor: of the same dtype and shape on all ranks. root_rank: the root, as Horovod spells it.
    """
    result: Tensor = broadcast_async(tensor, root, name=name, process_set=process_set, root_rank=root_rank).wait()
    return result


def broadcast_async(
    tensor: Tensor,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    root_rank: int | None = None,
) -> Handle:
    """As broadcast; the handle gives the result."""
    among, root = among_of(process_set), root_of(root, root_rank)
    output = tensor.detach().clone() if among.rank == among.number_of(root, "root") else _like(tensor)
    return _broadcast(among, output, root, name)


def broadcast_(
    tensor: Tensor,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    root_rank: int | None = None,
) -> Tensor:
    """As broadcast, in place: overwrites the tensor on the other ranks, and returns it."""
    result: Tensor = broadcast_async_(tensor, root, name=name, process_set=process_set, root_rank=root_rank).wait()
    return result


def broadcast_async_(
    tensor: Tensor,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    root_rank: int | None = None,
) -> Handle:
    """As broadcast_; the tensor is overwritten once the handle was waited for."""
    return _broadcast(among_of(process_set), tensor, root_of(root, root_rank), name)


def reduce(
    tensor: Tensor,
    root: int = 0,
    reduction: str = "mean",
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Tensor | None:
    """As all_reduce, on the root; None on the other ranks."""
    result: Tensor | None = reduce_async(tensor, root, reduction, name=name, process_set=process_set).wait()
    return result


def reduce_async(
    tensor: Tensor,
    root: int = 0,
    reduction: str = "mean",
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """As reduce; the handle gives the result."""
    among = among_of(process_set)
    number = among.number_of(root, "root")
    output = _like(tensor)
    call = operation.reduce(tensor, output, reduction, number, among.rank, among.size)
    return among.submit(call, name, lambda _: output if among.rank == number else None)


def gather(
    tensor: Tensor, root: int = 0, *, name: str | None = None, process_set: ProcessSet | None = None
) -> list[Tensor] | None:
    """Every rank's tensor, by rank, on the root; None on the other ranks. Shapes as of all_gather."""
    result: list[Tensor] | None = gather_async(tensor, root, name=name, process_set=process_set).wait()
    return result


def gather_async(
    tensor: Tensor, root: int = 0, *, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """As gather; the handle gives the list."""
    among = among_of(process_set)
    call = operation.gather(tensor, among.number_of(root, "root"), among.rank, among.size)
    return among.submit(call, name, lambda received: None if received is None else _shaped(received, tensor))


def scatter(
    tensors: Sequence[Tensor] | None,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """This rank's of the root's tensors.

    tensors: on the root one for each rank, of any dtypes and shapes; ignored on the other ranks, which get theirs in
    memory of the host. Raises ValueError on the root for another number of tensors.
    """
    result: Tensor = scatter_async(tensors, root, name=name, process_set=process_set).wait()
    return result


def scatter_async(
    tensors: Sequence[Tensor] | None,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """As scatter; the handle gives the tensor."""
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


# Among all ------------------------------------------------------------------------------------------------------------


def all_gather(tensor: Tensor, *, name: str | None = None, process_set: ProcessSet | None = None) -> list[Tensor]:
    """Every rank's tensor, by rank: torch.cat of them is what Horovod's allgather returns.

    tensor: of the same dtype and number of dimensions on all ranks; first dimensions may differ, the others must not.
    """
    result: list[Tensor] = all_gather_async(tensor, name=name, process_set=process_set).wait()
    return result


def all_gather_async(tensor: Tensor, *, name: str | None = None, process_set: ProcessSet | None = None) -> Handle:
    """As all_gather; the handle gives the list."""
    among = among_of(process_set)
    return among.submit(operation.all_gather(tensor, among.size), name, lambda received: _shaped(received, tensor))


def all_to_all(
    tensors: Sequence[Tensor], *, name: str | None = None, process_set: ProcessSet | None = None
) -> list[Tensor]:
    """tensors[r] goes to the set's r-th rank; returns what came from each, by rank.

    tensors: one for each rank, empty ones included, of one dtype; first dimensions may differ, the others must not.
    Raises ValueError for another number of tensors.
    """
    result: list[Tensor] = all_to_all_async(tensors, name=name, process_set=process_set).wait()
    return result


def all_to_all_async(
    tensors: Sequence[Tensor], *, name: str | None = None, process_set: ProcessSet | None = None
) -> Handle:
    """As all_to_all; the handle gives the list."""
    among = among_of(process_set)
    return among.submit(operation.all_to_all(tensors, among.size), name)


def reduce_scatter(
    tensors: Sequence[Tensor],
    reduction: str = "mean",
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """The set's r-th rank gets the reduction of all ranks' tensors[r].

    tensors: one for each rank, of one dtype, and the same shapes on all ranks. Reductions as of all_reduce.
    """
    result: Tensor = reduce_scatter_async(tensors, reduction, name=name, process_set=process_set).wait()
    return result


def reduce_scatter_async(
    tensors: Sequence[Tensor],
    reduction: str = "mean",
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle:
    """As reduce_scatter; the handle gives the tensor."""
    among = among_of(process_set)
    if len(tensors) != among.size:
        raise ValueError(f"reduce_scatter: {len(tensors)} tensors for {among.size} ranks; give one for each")
    output = _like(tensors[among.rank])
    call = operation.reduce_scatter(tensors, output, reduction, among.rank, among.size)
    return among.submit(call, name, lambda _: output)


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until all ranks are here."""
    among = among_of(process_set)
    among.submit(operation.barrier(among.size), None).wait()


def local_barrier() -> None:
    """Wait until all ranks of this host are here."""
    session().local_barrier()


# Handles --------------------------------------------------------------------------------------------------------------


def synchronize(handle: Handle | Handles) -> Any:
    """Wait for a handle: its result."""
    return handle.wait()


def poll(handle: Handle | Handles) -> bool:
    """Whether waiting for the handle would not block."""
    return handle.done


# What they are made of ------------------------------------------------------------------------------------------------


def _all_reduce(
    tensor: Tensor, output: Tensor, reduction: str, name: str | None, process_set: ProcessSet | None
) -> Handle:
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
    calls = [operation.all_reduce(t, o, reduction, among.size) for t, o in zip(tensors, outputs, strict=True)]
    group = among.name(name)

    def give(output: Tensor) -> Any:
        return lambda _: output

    return Handles(
        [
            among.submit(call, f"{group}.{i}", give(output), group, len(calls))
            for i, (call, output) in enumerate(zip(calls, outputs, strict=True))
        ]
    )


def _broadcast(among: ProcessSet, tensor: Tensor, root: int, name: str | None) -> Handle:
    call = operation.broadcast(tensor, among.number_of(root, "root"), among.rank, among.size)
    return among.submit(call, name, lambda _: tensor)


def _like(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        raise TypeError(f"the tensor is {tensor.layout}: give a dense one, or see coo_all_reduce")
    return torch.empty_like(tensor, requires_grad=False)


def _shaped(received: Sequence[Tensor], tensor: Tensor) -> list[Tensor]:
    return [each.reshape(()) for each in received] if tensor.dim() == 0 else list(received)
