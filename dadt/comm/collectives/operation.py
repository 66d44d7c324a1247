"""Prepares collectives on tensors of any dtype, memory layout and device, each as one operation of the C++ core."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from functools import reduce as fold
from typing import Any, Protocol

import torch

from dadt import _core
from dadt.comm.bucket import DTYPES
from dadt.comm.keepalive import Waited

REDUCTIONS = ("mean", "sum", "min", "max", "product")
_BITS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_BOOL = {"sum": "max", "max": "max", "min": "min", "product": "min"}
"""For each reduction of bools, the reduction of the bytes as which they are sent that gives the same result."""

Piece = tuple[int, int]
"""A range of memory: its address and its length in bytes."""


class Work(Waited, Protocol):
    """An operation in progress: either a work handle of the C++ engine or the ticket of a named tensor."""

    @property
    def received(self) -> Sequence[Any]: ...


@dataclass(slots=True)
class Operation:
    """One collective operation, ready to submit. Tensors in `keep` must stay alive, and inputs unchanged, until the
    operation is done."""

    verb: str
    signature: str
    """Text that describes the operation and must be equal on every rank."""
    kind: str
    """Operation of the C++ engine that does the work: "allreduce", "broadcast" or "exchange"."""
    layout: _core.Layout | None = None
    inputs: Sequence[int] = ()
    outputs: Sequence[int] = ()
    reduction: _core.Reduction = _core.Reduction.sum
    root: int = 0
    sends: Sequence[Piece] = ()
    receives: Sequence[Piece] | None = None
    finish: Callable[[Work], Any] = lambda work: None
    """Called once after the operation is done: copies the result to the caller's tensors, or returns it."""
    keep: list[torch.Tensor] = field(default_factory=list)


# One function for each collective operation ---------------------------------------------------------------------------


def all_reduce(tensor: torch.Tensor, output: torch.Tensor, reduction: str, size: int) -> Operation:
    """Prepare the reduction of `tensor` over `size` ranks into `output`, which has its dtype and shape and may be
    `tensor` itself. Raises TypeError or ValueError."""
    _check_reduction(reduction, tensor.dtype)
    signature = f"all_reduce {reduction} {_describe(tensor)}"
    if _is_folded(reduction, tensor.dtype):
        return _gather_and_fold("all_reduce", signature, tensor, output, reduction, range(size), size)
    host = host_copy(tensor)
    in_place = output is tensor and host.data_ptr() == tensor.data_ptr()
    target = host if in_place else host_target(output)
    call = _reduce_call("all_reduce", signature, [host], [target], reduction)
    call.finish = lambda work: deliver(target, output)
    return call


def all_reduce_together(tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], reduction: str) -> Operation:
    """Prepare one operation that reduces several tensors of one dtype. Raises TypeError or ValueError."""
    _check_same_dtype("all_reduce", tensors)
    _check_reduction(reduction, tensors[0].dtype)
    shapes = zlib.crc32(repr([tuple(t.shape) for t in tensors]).encode())
    count = sum(t.numel() for t in tensors)
    name = _name(tensors[0].dtype)
    signature = f"all_reduce {reduction} {name} of {len(tensors)} tensors, {count} elements, shapes {shapes:08x}"
    hosts = [host_copy(t) for t in tensors]
    targets = [
        host if output is tensor and host.data_ptr() == tensor.data_ptr() else host_target(output)
        for tensor, host, output in zip(tensors, hosts, outputs, strict=True)
    ]
    call = _reduce_call("all_reduce", signature, hosts, targets, reduction)
    call.finish = lambda work: [deliver(t, o) for t, o in zip(targets, outputs, strict=True)]
    return call


def reduce(tensor: torch.Tensor, output: torch.Tensor, reduction: str, root: int, rank: int, size: int) -> Operation:
    """Prepare the reduction of `tensor` over all ranks into the root's `output`; on other ranks output stays unchanged.
    Raises TypeError or ValueError."""
    _check_reduction(reduction, tensor.dtype)
    _check_root(root, size)
    signature = f"reduce {reduction} to rank {root} {_describe(tensor)}"
    if _is_folded(reduction, tensor.dtype):
        return _gather_and_fold("reduce", signature, tensor, output, reduction, [root], size)
    host = host_copy(tensor)
    target = host_target(output) if rank == root else None
    call = _reduce_call("reduce", signature, [host], [target], reduction)
    if target is not None:
        call.finish = lambda work: deliver(target, output)
    return call


def reduce_scatter(
    tensors: Sequence[torch.Tensor], output: torch.Tensor, reduction: str, rank: int, size: int
) -> Operation:
    """Prepare a reduce-scatter. tensors: one per rank, with the same shapes on all ranks. output becomes the reduction
    of all ranks' tensors[rank]. Raises TypeError or ValueError."""
    if len(tensors) != size:
        raise ValueError(f"reduce_scatter: {len(tensors)} tensors for {size} ranks; give one for each")
    _check_same_dtype("reduce_scatter", [*tensors, output])
    _check_reduction(reduction, output.dtype)
    if output.numel() != (wanted := tensors[rank].numel()):
        raise ValueError(f"reduce_scatter: the output has {output.numel()} elements, the result {wanted}")
    shapes = " ".join(str(list(t.shape)) for t in tensors)
    signature = f"reduce_scatter {reduction} {_name(output.dtype)} {shapes}"
    hosts = [host_copy(t) for t in tensors]
    if _is_folded(reduction, output.dtype):
        call = Operation("reduce_scatter", signature, "exchange", keep=hosts, sends=[_piece(h) for h in hosts])
        call.finish = lambda work: _fold(work, output, reduction)
        return call
    target = host_target(output)
    targets = [target if r == rank else None for r in range(size)]
    call = _reduce_call("reduce_scatter", signature, hosts, targets, reduction)
    call.finish = lambda work: deliver(target, output)
    return call


def broadcast(tensor: torch.Tensor, root: int, rank: int, size: int) -> Operation:
    """Prepare a broadcast, which overwrites the tensor on all ranks with the root's values. Raises ValueError."""
    _check_root(root, size)
    host = host_copy(tensor) if rank == root else host_target(tensor)
    call = Operation(
        "broadcast", f"broadcast from rank {root} {_describe(tensor)}", "broadcast", root=root, keep=[host]
    )
    call.layout = _core.Layout(_core.DType.uint8, [host.nbytes])
    call.inputs = call.outputs = [host.data_ptr()]
    if rank != root:
        call.finish = lambda work: deliver(host, tensor)
    return call


def all_gather(tensor: torch.Tensor, size: int, outputs: Sequence[torch.Tensor] | None = None) -> Operation:
    """Prepare an all-gather of every rank's tensor, ordered by rank: into `outputs`, or as a list of new tensors whose
    first dimensions may differ."""
    return _gather_call("all_gather", tensor, range(size), size, outputs, receiving=True)


def gather(
    tensor: torch.Tensor, root: int, rank: int, size: int, outputs: Sequence[torch.Tensor] | None = None
) -> Operation:
    """Prepare a gather of every rank's tensor on the root, into `outputs` or as a list of new tensors. On other ranks
    the result is None."""
    _check_root(root, size)
    return _gather_call(f"gather to rank {root}", tensor, [root], size, outputs, receiving=rank == root)


def scatter(output: torch.Tensor, tensors: Sequence[torch.Tensor] | None, root: int, rank: int, size: int) -> Operation:
    """Prepare a scatter: `output` receives tensors[rank] of the root's tensors, of which there is one per rank. Raises
    ValueError if their number is wrong."""
    _check_root(root, size)
    pieces: Sequence[torch.Tensor] = ()
    if rank == root:
        if tensors is None or len(tensors) != size:
            given = "none" if tensors is None else len(tensors)
            raise ValueError(f"scatter: {size} ranks need so many tensors on the root, rank {root}; there are {given}")
        _check_same_dtype("scatter", [*tensors, output])
        pieces = [host_copy(t) for t in tensors]
    target = host_target(output)
    signature = f"scatter from rank {root} {_name(output.dtype)}"
    call = Operation("scatter", signature, "exchange", keep=[*pieces, target])
    call.sends = [_piece(p) for p in pieces] or [(0, 0)] * size
    call.receives = [_piece(target) if r == root else (0, 0) for r in range(size)]
    call.finish = lambda work: deliver(target, output)
    return call


def all_to_all(tensors: Sequence[torch.Tensor], size: int, outputs: Sequence[torch.Tensor] | None = None) -> Operation:
    """Prepare an all-to-all: tensors[r] goes to rank r. The received tensors, ordered by rank, are put into `outputs`
    or returned as new tensors."""
    if len(tensors) != size or (outputs is not None and len(outputs) != size):
        raise ValueError(
            f"all_to_all: {size} ranks need so many tensors, empty ones included; there are {len(tensors)}"
        )
    _check_same_dtype("all_to_all", [*tensors, *(outputs or ())])
    hosts = [host_copy(t) for t in tensors]
    # If outputs are given, only their sizes in bytes have to match, as in torch.distributed.
    like = tensors[0] if outputs is not None else _alike("all_to_all", tensors)
    signature = f"all_to_all {_name(like.dtype)}" + (f" {_rows(like)}" if outputs is None else "")
    call = Operation("all_to_all", signature, "exchange", keep=hosts)
    call.sends = [_piece(h) for h in hosts]
    _receive(call, outputs, like)
    return call


def barrier(size: int) -> Operation:
    """Prepare a barrier, which ends when all ranks have reached it. It moves no bytes."""
    return Operation("barrier", "barrier", "exchange", sends=[(0, 0)] * size, receives=[(0, 0)] * size)


# Helpers of the functions above ---------------------------------------------------------------------------------------


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values in contiguous host memory, copied only if necessary. Raises TypeError if sparse."""
    if tensor.layout != torch.strided:
        raise TypeError(f"the tensor is {tensor.layout}: give a dense one, or see coo_all_reduce")
    detached = tensor.detach().resolve_conj().resolve_neg()
    if detached.device.type == "cpu":
        return detached.contiguous()
    host = torch.empty(detached.shape, dtype=detached.dtype, pin_memory=detached.device.type == "cuda", device="cpu")
    return host.copy_(detached)


def host_target(output: torch.Tensor) -> torch.Tensor:
    """Return host memory for a result with the output's shape: the output itself if it is contiguous and in host
    memory."""
    own = output.detach()
    if own.device.type == "cpu" and own.is_contiguous() and not own.is_conj() and not own.is_neg():
        return own
    return torch.empty(own.shape, dtype=own.dtype, pin_memory=own.device.type == "cuda", device="cpu")


def deliver(target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    if target.data_ptr() != output.data_ptr() or target.device != output.device:
        output.detach().copy_(target.view(output.shape))
    return output


def _reduce_call(
    verb: str, signature: str, hosts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor | None], reduction: str
) -> Operation:
    dtype = hosts[0].dtype
    parts = 2 if dtype.is_complex else 1
    call = Operation(verb, signature, "allreduce", keep=[*hosts, *(t for t in targets if t is not None)])
    call.layout = _core.Layout(DTYPES[dtype], [h.numel() * parts for h in hosts])
    call.inputs = [h.data_ptr() for h in hosts]
    call.outputs = [0 if t is None else t.data_ptr() for t in targets]
    call.reduction = getattr(_core.Reduction, _BOOL[reduction] if dtype == torch.bool else reduction)
    return call


def _gather_call(
    verb: str,
    tensor: torch.Tensor,
    receivers: Sequence[int] | range,
    size: int,
    outputs: Sequence[torch.Tensor] | None,
    receiving: bool,
) -> Operation:
    host = host_copy(tensor)
    # Signatures must be equal on all ranks, but in a gather only the root knows whether outputs are given. If all ranks
    # receive into outputs, only the bytes have to match, as in torch.distributed.
    shape = f" {_rows(tensor)}" if outputs is None or len(receivers) == 1 else ""
    call = Operation(verb.partition(" ")[0], f"{verb} {_name(tensor.dtype)}{shape}", "exchange", keep=[host])
    call.sends = [_piece(host) if r in receivers else (0, 0) for r in range(size)]
    if receiving:
        _receive(call, outputs, tensor)
    else:
        call.receives = [(0, 0)] * size
    return call


def _receive(call: Operation, outputs: Sequence[torch.Tensor] | None, like: torch.Tensor) -> None:
    """Set where the operation puts what it receives: into `outputs`, or into new tensors with the dtype and trailing
    sizes of `like` if outputs is None."""
    if outputs is None:
        trail = tuple(like.shape[1:])
        rows = like.shape[0] if like.dim() else 1
        call.finish = lambda work: [_new(memory, like, trail, rows) for memory in work.received]
        return
    _check_same_dtype(call.verb, [like, *outputs])
    targets = [host_target(o) for o in outputs]
    call.keep += targets
    call.receives = [_piece(t) for t in targets]
    call.finish = lambda work: [deliver(t, o) for t, o in zip(targets, outputs, strict=True)]


def _new(memory: Any, like: torch.Tensor, trail: tuple[int, ...], rows: int) -> torch.Tensor:
    """Return the received bytes as a tensor of rows with the sizes `trail`. rows: number of rows if a row has no
    elements, so that the bytes do not show it."""
    size = memoryview(memory).nbytes
    if size == 0:
        row = torch.Size(trail).numel()
        return torch.empty((0 if row else rows, *trail), dtype=like.dtype, device=like.device)
    return torch.frombuffer(memory, dtype=like.dtype).view(-1, *trail).to(like.device)


def _is_folded(reduction: str, dtype: torch.dtype) -> bool:
    """Whether the C++ core lacks this reduction, so that ranks gather all tensors and reduce them in rank order."""
    return reduction in _BITS or (dtype.is_complex and reduction == "product")


def _gather_and_fold(
    verb: str,
    signature: str,
    tensor: torch.Tensor,
    output: torch.Tensor,
    reduction: str,
    receivers: Sequence[int] | range,
    size: int,
) -> Operation:
    host = host_copy(tensor)
    call = Operation(verb, signature, "exchange", keep=[host])
    call.sends = [_piece(host) if r in receivers else (0, 0) for r in range(size)]
    call.finish = lambda work: _fold(work, output, reduction)
    return call


def _fold(work: Work, output: torch.Tensor, reduction: str) -> torch.Tensor:
    received = [memory for memory in work.received if memoryview(memory).nbytes]
    if received:
        values = [torch.frombuffer(memory, dtype=output.dtype).view(output.shape) for memory in received]
        output.detach().copy_(fold(_BITS.get(reduction, torch.mul), values))
    return output


def _check_reduction(reduction: str, dtype: torch.dtype) -> None:
    name = _name(dtype)
    if dtype not in DTYPES:
        known = ", ".join(_name(d) for d in DTYPES)
        raise TypeError(f"{name} cannot be reduced; convert it to one of {known}")
    if reduction in _BITS:
        if dtype.is_floating_point or dtype.is_complex:
            raise TypeError(f"{reduction} of {name}: bits are reduced of whole numbers and bools only")
    elif reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction}: choose one of {', '.join(REDUCTIONS)}")
    elif dtype == torch.bool and reduction == "mean":
        raise TypeError("the mean of bool is no bool: convert the tensor to float first")
    elif dtype.is_complex and reduction in ("min", "max"):
        raise TypeError(f"{reduction} of {name}: complex numbers have no order")


def _check_root(root: int, size: int) -> None:
    if not 0 <= root < size:
        raise ValueError(f"root {root} is no rank of {size}: ranks run from 0 to {size - 1}")


def _check_same_dtype(verb: str, tensors: Sequence[torch.Tensor]) -> None:
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) > 1:
        raise TypeError(f"{verb}: all tensors must be of one dtype; these are {', '.join(sorted(map(_name, dtypes)))}")


def _alike(verb: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one of the tensors, after checking that all have the same sizes except for the first one. torch.empty(0)
    has no rows and fits any other tensor. Raises ValueError if the sizes differ."""
    shaped = [t for t in tensors if t.shape != (0,)]
    for tensor in shaped:
        if tensor.shape[1:] != shaped[0].shape[1:]:
            raise ValueError(
                f"{verb}: all tensors must have the same sizes but for the first; there are {_rows(shaped[0])} and"
                f" {_rows(tensor)}"
            )
    return shaped[0] if shaped else tensors[0]


def _piece(tensor: torch.Tensor) -> Piece:
    return (tensor.data_ptr(), tensor.nbytes)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(tensor: torch.Tensor) -> str:
    return f"{_name(tensor.dtype)} {list(tensor.shape)}"


def _rows(tensor: torch.Tensor) -> str:
    """Return the tensor's shape as text, with * in place of the first size."""
    return f"[{', '.join(['*', *map(str, tensor.shape[1:])])}]" if tensor.dim() else "[]"
