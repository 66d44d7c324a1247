"""The process group of torch.distributed's backend `dadt`: runs the collectives that torch calls on DADT's executors,
through the C++ engine."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from dadt.comm import executors
from dadt.comm.backend.arguments import Tensors, first, listed, parts, reduction_of, rows
from dadt.comm.backend.rendezvous import GroupRendezvous
from dadt.comm.backend.work import BackendWork, PendingWorks, Transfer
from dadt.comm.collectives import operation
from dadt.comm.collectives.ordered import OrderedGroup
from dadt.comm.peer_deaths import Abort
from dadt.config import Config, executor
from dadt.errors import CommError, StartTimeout
from dadt.world import World, ranked

CLOSE_SECONDS = 5.0
"""Seconds that closing a process group waits for operations the script started but never waited for."""
TAGS = 1 << 29
"""Tags of scripts' messages are below this number; those from here on are reserved for DADT's own messages."""
_EARLIER = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Maps new names of torch's collectives to the names that earlier versions of torch use."""
_ProcessGroup: Any = dist.ProcessGroup
"""torch's ProcessGroup, typed as Any because its type annotations differ between versions of torch."""
_Verb = TypeVar("_Verb", bound=Callable[..., Any])
_live: weakref.WeakSet[Backend] = weakref.WeakSet()


def create(options: Any, own: Any, watch: Callable[[Abort], None]) -> Backend:
    """Create one rank's side of a process group; torch calls this from init_process_group and new_group. watch:
    registers a callback that is called when a rank of the job ends. Raises ValueError if `own` (pg_options) is set."""
    if own is not None:
        raise ValueError(f"backend dadt has no options of its own, but pg_options is {own!r}; leave it out")
    members = list(options.global_ranks_in_group)
    group = Backend(options.store, options.group_rank, options.group_size, options.timeout.total_seconds(), members)
    if not _live:
        atexit.register(_end)
        watch(_lose)
    _live.add(group)
    return group


def _lose(reason: str, lost: bool) -> None:
    """Fail all open process groups because a rank of the job has ended, so that no operation waits for this rank."""
    for group in list(_live):
        group.lose(reason)


def _end() -> None:
    """Close the process groups that the script left open. Runs at exit, while the interpreter still works."""
    failed = isinstance(getattr(sys, "last_value", None), BaseException)
    with ExitStack() as stack:  # the stack closes every group even if closing one raises
        for group in list(_live):
            stack.callback(group.shutdown)
            if failed:
                stack.callback(group.abort)


def _verb(method: _Verb) -> _Verb:
    """Decorator for the method of a collective. For CUDA tensors, it calls NCCL's method of the same name if every rank
    has its own GPU."""

    @wraps(method)
    def either(self: Backend, *args: Any, **options: Any) -> Any:
        if self._gpu_each and first(args).is_cuda:
            name, nccl = method.__name__, self._nccl()
            return getattr(nccl, name if hasattr(nccl, name) else _EARLIER[name])(*args, **options)
        return method(self, *args, **options)

    return cast(_Verb, either)


class Backend(_ProcessGroup):  # type: ignore[misc]
    """The methods that torch.distributed calls. Rank numbers are those within the group; most calls pass a list with
    one tensor."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, members: Sequence[int] = ()) -> None:
        """members: global ranks of the group. Raises StartTimeout naming those that do not join in `timeout`
        seconds."""
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._limit = 0.0  # 0 uses the executor's timeout, which equals `timeout` until the script sets another one
        self._store = store
        apart = bool(members) and list(members) != list(range(size))
        whose = f" (ranks counted within the group of {ranked(members)})" if apart else ""
        try:
            self._meeting = GroupRendezvous(store, rank, size, timeout)
            around = self._meeting.look_around()
        except StartTimeout as error:
            raise StartTimeout(f"{error}{whose}") from None
        config = replace(Config.from_env(), timeout=timeout, start_timeout=timeout, executor=_executor(around.workers))
        config = replace(config, broadcast_executor="", allreduce_executor="")
        self._group = OrderedGroup(executors.connect(config, around.world, self._meeting), rank, size)
        self._deliveries = PendingWorks(self._meeting, whose)
        self._gpu_each = around.gpu_each
        self._inner: Any = None
        self._name = self._description = ""
        self._batch: list[BackendWork] | None = None
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    # Allreduce, reduce and reduce-scatter -----------------------------------------------------------------------------

    @_verb
    def allreduce(self, tensors: Any, opts: Any = None) -> BackendWork:
        tensors, reduction = listed(tensors), reduction_of(opts)
        return self._run(tensors, opts, [operation.all_reduce(t, t, reduction, self._size) for t in tensors])

    @_verb
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> BackendWork:
        return self.allreduce(tensors, opts)

    @_verb
    def reduce(self, tensors: Any, opts: Any) -> BackendWork:
        tensors, reduction, root = listed(tensors), reduction_of(opts), opts.rootRank
        calls = [operation.reduce(t, t, reduction, root, self._rank, self._size) for t in tensors]
        return self._run(tensors, opts, calls)

    @_verb
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> BackendWork:
        reduction = reduction_of(opts)
        pairs = zip(inputs, outputs, strict=True)
        calls = [operation.reduce_scatter(i, o, reduction, self._rank, self._size) for i, o in pairs]
        return self._run(outputs, opts, calls)

    @_verb
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> BackendWork:
        return self.reduce_scatter([output], [parts(tensor, output, self._size)], opts)

    _reduce_scatter_base = reduce_scatter_single

    @_verb
    def reduce_scatter_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> BackendWork:
        pieces = [parts(t, o, self._size) for t, o in zip(tensors, outputs, strict=True)]
        return self.reduce_scatter(outputs, pieces, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Broadcast, scatter and gather: one rank is the root --------------------------------------------------------------

    @_verb
    def broadcast(self, tensors: Any, opts: Any) -> BackendWork:
        tensors = listed(tensors)
        calls = [operation.broadcast(t, opts.rootRank, self._rank, self._size) for t in tensors]
        return self._run(tensors, opts, calls)

    @_verb
    def gather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> BackendWork:
        root = opts.rootRank
        places: Sequence[Tensors | None] = outputs if root == self._rank else [None] * len(tensors)
        calls = [operation.gather(t, root, self._rank, self._size, o) for t, o in zip(tensors, places, strict=True)]
        return self._run(outputs, opts, calls)

    @_verb
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> BackendWork:
        root = opts.rootRank
        given: Sequence[Tensors | None] = inputs if root == self._rank else [None] * len(outputs)
        calls = [operation.scatter(o, i, root, self._rank, self._size) for o, i in zip(outputs, given, strict=True)]
        return self._run(outputs, opts, calls)

    # All-gather and all-to-all ----------------------------------------------------------------------------------------

    @_verb
    def allgather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> BackendWork:
        pairs = zip(outputs, tensors, strict=True)
        return self._run(outputs, opts, [operation.all_gather(t, self._size, o) for o, t in pairs])

    @_verb
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> BackendWork:
        return self.allgather([parts(output, tensor, self._size)], [tensor], opts)

    _allgather_base = all_gather_single

    @_verb
    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> BackendWork:
        pieces = [parts(o, t, self._size) for o, t in zip(outputs, tensors, strict=True)]
        return self.allgather(pieces, tensors, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_verb
    def allgather_coalesced(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> BackendWork:
        """outputs: one list per rank, each with one output tensor per input tensor."""
        return self.allgather(list(zip(*outputs, strict=True)), tensors, opts)

    @_verb
    def alltoall(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> BackendWork:
        return self._run(outputs, opts, [operation.all_to_all(tensors, self._size, outputs)])

    @_verb
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        splits: Sequence[int],
        opts: Any = None,
    ) -> BackendWork:
        """output_splits, splits: number of rows received from and sent to each rank; equal parts if empty."""
        outputs, tensors = rows(output, output_splits, self._size), rows(tensor, splits, self._size)
        return self._run([output], opts, [operation.all_to_all(tensors, self._size, outputs)])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> BackendWork:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # waits for queued work, as NCCL does
            torch.cuda.current_stream().synchronize()
        return self._run([], opts, [operation.barrier(self._size)])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks arrive. wait_all_ranks has no effect, because errors always name every missing rank."""
        self._run([], None, [operation.barrier(self._size)]).wait(timeout)

    # Messages between two ranks ---------------------------------------------------------------------------------------

    @_verb
    def send(self, tensors: Tensors, peer: int, tag: int) -> BackendWork:
        self._check_message(tag)
        hosts = [operation.host_copy(t) for t in tensors]
        transits = [self._group.mail.send(h, peer, tag) for h in hosts]
        return self._carry(f"send to rank {peer} (tag {tag})", tensors, [(t, None) for t in transits])

    @_verb
    def recv(self, tensors: Tensors, peer: int, tag: int) -> BackendWork:
        return self._receive(f"receive from rank {peer} (tag {tag})", tensors, peer, tag)

    @_verb
    def recv_anysource(self, tensors: Tensors, tag: int) -> BackendWork:
        return self._receive(f"receive from any rank (tag {tag})", tensors, None, tag)

    def _receive(self, what: str, tensors: Tensors, peer: int | None, tag: int) -> BackendWork:
        self._check_message(tag)
        targets = [operation.host_target(t) for t in tensors]
        parcels: list[Transfer] = []
        for target, tensor in zip(targets, tensors, strict=True):
            transit = self._group.mail.receive(target, peer, tag)
            parcels.append((transit, partial(operation.deliver, target, tensor)))
        return self._carry(what, tensors, parcels)

    def _check_message(self, tag: int) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("the process group belongs to the parent process; a forked child sends no messages")
        if not 0 <= tag < TAGS:
            raise ValueError(f"tag {tag}: backend dadt takes tags from 0 to {TAGS - 1}")

    def _carry(self, what: str, tensors: Tensors, parcels: Sequence[Transfer]) -> BackendWork:
        return self._deliveries.add(BackendWork(self._deliveries, what, 0, parcels, list(tensors), self._timeout))

    # Properties and settings that torch asks a process group for ------------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "dadt"

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    group_name = property(getGroupName)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])]

    def _get_backend(self, device: torch.device) -> Any:
        return self._nccl()._get_backend(device) if self._gpu_each and device.type == "cuda" else self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = self._limit = timeout.total_seconds()

    set_timeout = _set_default_timeout

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> BackendWork:
        batch, self._batch = self._batch or [], None
        return BackendWork.of(self._deliveries, batch, self._timeout)

    # Creation and end of the process group ----------------------------------------------------------------------------

    def abort(self) -> None:
        """Fail all pending and future operations on this rank and, if the executor supports this, on its peers."""
        self._group.abort(f"rank {self._rank} has aborted the process group")
        if self._inner is not None:
            self._inner._get_backend(torch.device("cuda")).abort()

    def lose(self, reason: str) -> None:
        """Fail the group's operations with `reason`, because a rank of the job has ended."""
        if not self._closed:
            self._group.abort(reason, lost=True)

    def shutdown(self) -> None:
        """Close the group after at most CLOSE_SECONDS for pending operations. Does nothing in a forked child."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        try:
            self._group.close(min(self._timeout, CLOSE_SECONDS))
        except CommError:
            pass  # an operation failed; the callers that wait for it get the error themselves
        self._deliveries.close(CLOSE_SECONDS)
        if self._inner is not None:
            self._inner._get_backend(torch.device("cuda")).shutdown()

    def _run(self, outputs: Any, opts: Any, calls: Sequence[operation.Operation]) -> BackendWork:
        """Submit the operations, in an order that must be the same on all ranks. Return one work handle for all of
        them."""
        given = opts.timeout.total_seconds() if hasattr(opts, "timeout") else 0.0
        limit = given if given > 0 else self._limit
        with self._lock:
            try:
                pending = [self._group.submit(call) for call in calls]
            except CommError as error:
                raise dist.DistBackendError(f"dadt: {error}") from error
            number = self._group.calls
        what = ", ".join(dict.fromkeys(call.verb for call in calls))
        delivery = BackendWork(self._deliveries, what, number, [(p, None) for p in pending], list(outputs), limit)
        if self._batch is not None:
            self._batch.append(delivery)
        return self._deliveries.add(delivery)

    def _nccl(self) -> Any:
        """Return the group's NCCL process group, created on first use, because by then the script has chosen its GPU.

        Wraps ProcessGroupNCCL in a ProcessGroup, because only the wrapper exposes all collectives to Python.
        """
        with self._lock:
            if self._inner is None:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=self._timeout)
                store = PrefixStore("nccl", self._store)
                nccl = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
                self._inner = _ProcessGroup(self._rank, self._size)
                self._inner._register_backend(torch.device("cuda"), _ProcessGroup.BackendType.NCCL, nccl)
            return self._inner


def _executor(workers: Sequence[int]) -> str:
    """Return the name of the executor for the group's CPU tensors. Under `dadt run` the configured executor serves
    training and may need GPUs or all ranks, so one for host memory is picked; elsewhere the user's choice stands."""
    asked = Config.from_env().executor
    if World.from_env().job or asked in ("auto", "nccl", "mpi", "mpicuda"):
        return executor.pick_for_host_memory(workers)[0]
    return asked
