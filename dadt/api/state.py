"""The same model and optimizer on all ranks, to begin with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dadt import _core
from dadt.api.lifecycle import among_of, root_of
from dadt.comm import plain
from dadt.comm.collectives import operation
from dadt.comm.collectives.object import allgather_object as gather
from dadt.comm.collectives.object import broadcast_object as spread
from dadt.comm.collectives.object import gather_bytes
from dadt.comm.collectives.operation import Operation
from dadt.errors import Mismatch

if TYPE_CHECKING:
    from torch import Tensor

    from dadt.comm.collectives.process_set import ProcessSet

_FUSED_BYTES = 64 << 20


def broadcast_parameters(
    parameters: Mapping[str, Any] | Iterable[tuple[str, Tensor]],
    root: int = 0,
    *,
    process_set: ProcessSet | None = None,
    root_rank: int | None = None,
) -> None:
    """Overwrite the tensors with the root's, in place.

    parameters: a module's state_dict() or named_parameters(), the same names, dtypes and shapes on all ranks; else
    Mismatch names the first that differs. root_rank: the root, as Horovod spells it. Raises TypeError for what is no
    tensor.
    """
    among = among_of(process_set)
    items = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    for name, value in items:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"broadcast_parameters: {name} is no tensor: use broadcast_object")
    _compare(among, [f"{n} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for n, t in items])
    _overwrite(among, [t for _, t in items], among.number_of(root_of(root, root_rank), "root"))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root: int = 0,
    *,
    process_set: ProcessSet | None = None,
    root_rank: int | None = None,
) -> None:
    """Take the root's optimizer state and settings (learning rate, momentum, ...), also where there is no state yet.

    optimizer: of the same kind, for the same parameters in the same order, on all ranks; else Mismatch. What is no
    tensor in it is pickled, as in broadcast_object.
    root_rank: the root, as Horovod spells it.
    """
    among = among_of(process_set)
    number = among.number_of(root_of(root, root_rank), "root")
    groups = [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    _compare(among, [type(optimizer).__name__, *(f"group of parameters {shapes}" for shapes in groups)])
    tensors: list[Tensor] = []
    state = optimizer.state_dict()
    sketch = spread(among, _sketch(state, tensors) if among.rank == number else None, number, among.name(None))
    if among.rank != number:
        state = _fill(sketch, tensors)
    _overwrite(among, tensors, number)
    if among.rank != number:
        optimizer.load_state_dict(state)


def broadcast_object(
    value: Any = None,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    root_rank: int | None = None,
) -> Any:
    """The root's object, on all ranks; the others' arguments are ignored. root_rank: the root, as Horovod spells it.

    Pickled, so only between ranks that have proved that they belong to this job: DadtError where those of several
    hosts met without a secret, as under torchrun without DADT_SECRET. Raises what pickling raises.
    """
    among = among_of(process_set)
    return spread(among, value, among.number_of(root_of(root, root_rank), "root"), among.name(name))


def allgather_object(value: Any, *, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Every rank's object, by rank. Pickled, as in broadcast_object."""
    among = among_of(process_set)
    return gather(among, value, among.name(name))


class _Tensor:
    """Stands for a tensor of the root's in what is pickled."""

    def __init__(self, like: Tensor) -> None:
        self.shape = tuple(like.shape)
        self.dtype = like.dtype


def _sketch(value: Any, tensors: list[Tensor]) -> Any:
    """The value with tensors replaced, which are collected."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Tensor(value)
    if isinstance(value, dict):
        return {key: _sketch(each, tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return _rebuilt(value, [_sketch(each, tensors) for each in value])
    return value


def _fill(sketch: Any, tensors: list[Tensor]) -> Any:
    """The same with new tensors in their places, of the host: load_state_dict brings them to their parameters."""
    if isinstance(sketch, _Tensor):
        tensors.append(torch.empty(sketch.shape, dtype=sketch.dtype, device="cpu"))
        return tensors[-1]
    if isinstance(sketch, dict):
        return {key: _fill(each, tensors) for key, each in sketch.items()}
    if isinstance(sketch, (list, tuple)):
        return _rebuilt(sketch, [_fill(each, tensors) for each in sketch])
    return sketch


def _rebuilt(like: Any, items: list[Any]) -> Any:
    """A list or tuple of its type; a named one takes its items one by one."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def _compare(among: ProcessSet, lines: Sequence[str]) -> None:
    """Raises the same Mismatch on all ranks where their lines differ."""
    told = plain.encode(list(lines), "what the ranks are to have alike")
    every = [plain.decode(data) for data in gather_bytes(among, told, among.name(None))]
    for rank, theirs in zip(among.ranks, every, strict=True):
        if theirs != every[0]:
            pairs = zip([*every[0], "nothing more"], [*theirs, "nothing more"], strict=False)
            mine, other = next((a, b) for a, b in pairs if a != b)
            raise Mismatch(
                f"rank {among.ranks[0]} has {mine}, rank {rank} has {other}: every rank must build the same model"
            )


def _overwrite(among: ProcessSet, tensors: Sequence[Tensor], root: int) -> None:
    """With the root's, many in one operation. All ranks have the same ones."""
    with torch.no_grad():
        parts: list[list[Tensor]] = [[]]
        room = _FUSED_BYTES
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if size > room and parts[-1]:
                parts.append([])
                room = _FUSED_BYTES
            parts[-1].append(tensor)
            room -= size
        for handle in [among.submit(_broadcast(part, root, among.rank), None) for part in parts if part]:
            handle.wait()


def _broadcast(tensors: Sequence[Tensor], root: int, rank: int) -> Operation:
    hosts = [operation.host_copy(t) if rank == root else operation.host_target(t) for t in tensors]
    sizes = [h.numel() * h.element_size() for h in hosts]
    call = Operation(
        "broadcast", f"broadcast from rank {root} of {sum(sizes)} bytes", "broadcast", root=root, keep=hosts
    )
    call.layout = _core.Layout(_core.DType.uint8, sizes)
    call.inputs = call.outputs = [h.data_ptr() for h in hosts]
    if rank != root:
        call.finish = lambda work: [operation.deliver(h, t) for h, t in zip(hosts, tensors, strict=True)]
    return call
