"""Broadcasts that give all ranks the same model and optimizer."""

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
    """Overwrite the tensors with those of the root, in place.

    parameters: a module's state_dict() or named_parameters(), with the same names, dtypes and shapes on all ranks;
    otherwise Mismatch names the first that differs. root_rank: Horovod's name for root. Raises TypeError for a value
    that is not a tensor.
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
    """Load the root's optimizer state and settings (learning rate, momentum, ...), even where there is no state yet.

    optimizer: same type, with the same parameters in the same order, on all ranks; otherwise raises Mismatch. Values
    that are not tensors are pickled, which raises DadtError if ranks of several hosts met without a secret that proves
    that they belong to the job. root_rank: Horovod's name for root.
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
        before = list(optimizer.param_groups)
        optimizer.load_state_dict(state)
        # Keep the optimizer's own dictionaries and change their content, because the script may have references to
        # them.
        for mine, loaded in zip(before, optimizer.param_groups, strict=True):
            mine.clear()
            mine.update(loaded)
        optimizer.param_groups[:] = before


def broadcast_object(
    value: Any = None,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    root_rank: int | None = None,
) -> Any:
    """Return the root's object on all ranks. Other ranks' values are ignored. root_rank: Horovod's name for root.

    The object is pickled, so this works only between ranks that have proved that they belong to the job: it raises
    DadtError if ranks of several hosts met without a secret, as under torchrun without DADT_SECRET. Errors of pickle
    are raised as they are.
    """
    among = among_of(process_set)
    return spread(among, value, among.number_of(root_of(root, root_rank), "root"), among.name(name))


def allgather_object(value: Any, *, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Return every rank's object, by rank. Objects are pickled, so this raises DadtError if ranks of several hosts met
    without a secret that proves that they belong to the job."""
    among = among_of(process_set)
    return gather(among, value, among.name(name))


class _Tensor:
    """Placeholder for one of the root's tensors in pickled optimizer state. The tensor itself is broadcast
    separately."""

    def __init__(self, like: Tensor) -> None:
        self.shape = tuple(like.shape)
        self.dtype = like.dtype


def _sketch(value: Any, tensors: list[Tensor]) -> Any:
    """Return the value with a placeholder in place of each tensor, and append the tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Tensor(value)
    if isinstance(value, dict):
        return {key: _sketch(each, tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return _rebuilt(value, [_sketch(each, tensors) for each in value])
    return value


def _fill(sketch: Any, tensors: list[Tensor]) -> Any:
    """Return the state with a new tensor in host memory in place of each placeholder, and append the new tensors to
    `tensors`. load_state_dict later copies their values to the parameters' devices."""
    if isinstance(sketch, _Tensor):
        tensors.append(torch.empty(sketch.shape, dtype=sketch.dtype, device="cpu"))
        return tensors[-1]
    if isinstance(sketch, dict):
        return {key: _fill(each, tensors) for key, each in sketch.items()}
    if isinstance(sketch, (list, tuple)):
        return _rebuilt(sketch, [_fill(each, tensors) for each in sketch])
    return sketch


def _rebuilt(like: Any, items: list[Any]) -> Any:
    """Return a list or tuple of the same type as `like`. The constructor of a named tuple takes the items one by
    one."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def _compare(among: ProcessSet, lines: Sequence[str]) -> None:
    """Raise the same Mismatch on all ranks if any rank's list of lines differs from the first rank's."""
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
    """Overwrite the tensors with the root's values, many tensors in one operation. All ranks pass tensors of the same
    sizes."""
    with torch.no_grad():
        parts: list[list[Tensor]] = [[]]
        room = _FUSED_BYTES
        for tensor in tensors:
            size = tensor.nbytes
            if size > room and parts[-1]:
                parts.append([])
                room = _FUSED_BYTES
            parts[-1].append(tensor)
            room -= size
        for handle in [among.submit(_broadcast(part, root, among.rank), None) for part in parts if part]:
            handle.wait()


def _broadcast(tensors: Sequence[Tensor], root: int, rank: int) -> Operation:
    hosts = [operation.host_copy(t) if rank == root else operation.host_target(t) for t in tensors]
    sizes = [h.nbytes for h in hosts]
    call = Operation(
        "broadcast", f"broadcast from rank {root} of {sum(sizes)} bytes", "broadcast", root=root, keep=hosts
    )
    call.layout = _core.Layout(_core.DType.uint8, sizes)
    call.inputs = call.outputs = [h.data_ptr() for h in hosts]
    if rank != root:
        call.finish = lambda work: [operation.deliver(h, t) for h, t in zip(hosts, tensors, strict=True)]
    return call
