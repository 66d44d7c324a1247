"""Executor over MPI through mpi4py (Open MPI, MPICH or Intel MPI), for ranks that mpirun or srun has started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from dadt.comm.executors import proof, pull
from dadt.comm.executors.base import Connection
from dadt.comm.executors.meet import Meet
from dadt.comm.executors.mpi_process import process
from dadt.comm.keepalive import KeepAlive, leak
from dadt.config import Config
from dadt.control import mpi_library
from dadt.errors import Aborted, CommTimeout, ConfigError, Mismatch, PeerLost
from dadt.world import World

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}
_OPERATIONS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}
_MOST = 1 << 30
"""Largest number of bytes, or of elements to reduce, in one call, because MPI's counts have 32 bits."""
_WIDENED = 1 << 20
"""Number of 16-bit floats that are converted to float32 at a time, since MPI cannot reduce 16-bit floats; few enough to
stay in the processor's cache."""
_VERBS = ("an allreduce", "an allgather", "a broadcast", "an exchange")
_SPIN_SECONDS = 1e-4
"""Seconds for which a rank polls without sleeping, because a short wait ends sooner than the kernel could wake a
thread."""
_LONGEST_PAUSE = 1e-3


def connect(config: Config, world: World, meet: Meet) -> Connection:
    """Connect the ranks of `world`, which may be a part of MPI's world. Raises ConfigError if MPI is not usable."""
    executor = joiner(config, world, meet)(range(world.world_size))
    return pull.connect(executor, world.rank, world.world_size, config.timeout)


def joiner(config: Config, world: World, meet: Meet) -> Callable[[Sequence[int]], Mpi]:
    """Return a function that connects some ranks of the world; each of these ranks calls it with the same list. Raises
    ConfigError if MPI is not usable."""
    mpi = process.begin()
    ranks = _ranks(mpi, world, meet)

    def join(some: Sequence[int]) -> Mpi:
        joined = _joined(mpi, [ranks[rank] for rank in some], config.timeout)
        proof.prove(joined, meet.secret, some.index(world.rank), some, "mpi", f"mpi {list(some)}", config.start_timeout)
        return joined

    return join


def _ranks(mpi: Any, world: World, meet: Meet) -> list[int]:
    """Return the MPI rank of each rank of the world. Raises ConfigError if MPI's world does not contain these ranks or
    orders them differently."""
    everyone = mpi.COMM_WORLD
    ranks = [int(rank) for rank in meet.exchange("mpi rank", str(everyone.rank).encode())]
    if len(set(ranks)) < len(ranks):
        raise ConfigError(
            f"executor mpi: MPI does not know these {world.world_size} ranks as one world: mpirun has not started "
            f"them, or mpi4py has loaded another library ({process.library}) than mpirun's -> start them by mpirun, "
            f"and name its library by {mpi_library.CHOICE}=/path/to/libmpi.so"
        )
    if everyone.size == world.world_size and ranks != sorted(ranks):
        raise ConfigError(
            f"executor mpi: rank {world.rank} is rank {everyone.rank} of MPI: variables or files of MPI choose "
            "another order of ranks -> take them away"
        )
    return ranks


def _joined(mpi: Any, ranks: Sequence[int], timeout: float) -> Mpi:
    group = mpi.COMM_WORLD.Get_group().Incl(ranks)
    comm = mpi.COMM_WORLD.Create_group(group)
    group.Free()
    # Make MPI return error codes, which mpi4py raises as exceptions, instead of ending the process.
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    process.opened()
    return Mpi(mpi, comm, timeout)


class Mpi:
    """An MPI communicator as an Executor.

    MPI waits by spinning, which takes a processor core from training while a peer is late, and cannot be interrupted.
    Ranks therefore first wait for each other in a tiny non-blocking allreduce, polled at growing intervals, which also
    compares their operations. MPI's blocking collectives, twice as fast as the non-blocking ones, then start with all
    ranks present.
    """

    name = "mpi"

    def __init__(self, mpi: Any, comm: Any, timeout: float) -> None:
        """comm: the communicator, which nothing else may use from now on."""
        self._mpi = mpi
        self._comm = comm
        # A second communicator for messages, so that callers' message tags cannot collide with other messages.
        self._mail = comm.Dup()
        self._highest_tag = comm.Get_attr(mpi.TAG_UB)
        self._timeout = timeout
        self._kept = KeepAlive(lambda: self._aborted)
        self._aborted = False
        self._serial = process.serial
        # Two integers per rank are exchanged before every operation. Their buffers are reused, because creating tensors
        # would take longer than MPI itself.
        self._mine, self._least = (memoryview(bytearray(16)).cast("q") for _ in range(2))
        self._wires = [[each, 2, mpi.INT64_T] for each in (self._mine, self._least)]

    @property
    def world_size(self) -> int:
        return int(self._comm.size)

    def allreduce(self, flat: torch.Tensor, reduction: str) -> None:
        self._await_all("an allreduce", flat.nbytes)
        if flat.dtype in _TYPES:
            for part in torch.split(flat, _MOST):
                self._reduce(part, reduction)
            return
        for part in torch.split(flat, _WIDENED):
            wide = part.to(torch.float32)
            self._reduce(wide, reduction)
            part.copy_(wide)

    def _reduce(self, part: torch.Tensor, reduction: str) -> None:
        kind = getattr(self._mpi, _TYPES[part.dtype])
        operation = getattr(self._mpi, _OPERATIONS[reduction])
        with self._serial:
            self._comm.Allreduce(self._mpi.IN_PLACE, [self._memory(part), part.numel(), kind], operation)

    def allgather(self, mine: torch.Tensor, all: torch.Tensor) -> None:
        if all.nbytes > _MOST:
            rows = all.view(self._comm.size, -1)
            rows[self._comm.rank].copy_(mine)
            for root, row in enumerate(rows):
                self.broadcast(row, root)
            return
        self._await_all("an allgather", mine.nbytes)
        with self._serial:
            self._comm.Allgather(self._bytes(mine), self._bytes(all, self._comm.size))

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        self._await_all("a broadcast", flat.nbytes, root)
        for part in torch.split(flat.view(torch.uint8), _MOST):
            with self._serial:
                self._comm.Bcast(self._bytes(part), root)

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        self._await_all("an exchange")
        rank, size = self._comm.rank, self._comm.size
        with self._serial:
            requests = [
                self._comm.Irecv(self._bytes(part), (rank - offset) % size)
                for offset in range(1, size)
                for part in _parts(receives[(rank - offset) % size])
            ]
            requests += [
                self._comm.Isend(self._bytes(part), (rank + offset) % size)
                for offset in range(1, size)
                for part in _parts(sends[(rank + offset) % size])
            ]
            receives[rank].copy_(sends[rank])
            self._mpi.Request.Waitall(requests)

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> MpiMessage:
        """Start sending a message of at most 1 GiB. Raises ValueError for larger ones, and for a tag above MPI's
        maximum."""
        self._check(tensor, tag)
        with self._serial:
            request = self._mail.Isend(self._bytes(tensor), peer, tag)
        return self._keep(MpiMessage(self, tensor, request, False))

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> MpiMessage:
        """Start receiving a message of at most 1 GiB. Raises ValueError for larger ones, and for a tag above MPI's
        maximum."""
        self._check(tensor, tag)
        source = self._mpi.ANY_SOURCE if peer is None else peer
        with self._serial:
            request = self._mail.Irecv(self._bytes(tensor), source, tag)
        return self._keep(MpiMessage(self, tensor, request, True))

    def _keep(self, message: MpiMessage) -> MpiMessage:
        self._kept.add(message, message)
        return message

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        if not self._aborted:
            with self._serial:
                self._mail.Free()
                self._comm.Free()
        leak(self._kept)  # MPI may still write to the tensors of receives that never finished
        process.closed(failed=self._aborted)

    def until(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait until `done` returns true, polling ever less often, so that a late peer costs no processor core. Raises
        CommTimeout after `timeout` seconds, or Aborted."""
        begun = perf_counter()
        while not done():
            waited = perf_counter() - begun
            if self._aborted:
                raise Aborted(f"{what} was given up")
            if waited > timeout:
                raise CommTimeout(f"{what} was not done within {timeout:g} s: a peer did not come")
            if waited > _SPIN_SECONDS:
                time.sleep(min(_LONGEST_PAUSE, waited / 10))

    def _await_all(self, verb: str, size: int = 0, root: int = 0) -> None:
        """Wait until all ranks have reached this operation. Raises Mismatch on all ranks if their operations differ."""
        mine = size << 24 | root << 4 | _VERBS.index(verb)
        # the minimum of negated values is the negated maximum
        self._mine[0], self._mine[1] = mine, -mine
        with self._serial:
            request = self._comm.Iallreduce(*self._wires, self._mpi.MIN)
        self.until(lambda: self.test(request), self._timeout, verb)
        least, greatest = self._least[0], -self._least[1]
        if least != greatest:
            raise self._differing(mine)

    def _differing(self, mine: int) -> Mismatch:
        """Return the error that names two ranks in different operations. All ranks must call this; each knows that
        operations differ."""
        self._mine[0] = mine
        every = memoryview(bytearray(8 * self._comm.size)).cast("q")
        with self._serial:
            self._comm.Allgather([self._mine, 1, self._mpi.INT64_T], [every, 1, self._mpi.INT64_T])
        rank = next(rank for rank, key in enumerate(every) if key != every[0])
        return Mismatch(
            f"rank 0 is in {_told(every[0])}, rank {rank} in {_told(every[rank])}: the ranks do not run the same steps"
        )

    def test(self, request: Any, status: Any = None) -> bool:
        """Return whether the MPI request is done. status: filled with the message's source and length."""
        with self._serial:
            return bool(request.Test(status))

    def _memory(self, tensor: torch.Tensor) -> Any:
        """Return the tensor's memory as MPI's buffer; for a GPU tensor, after all pending writes are done."""
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        return self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def _bytes(self, tensor: torch.Tensor, shares: int = 1) -> list[Any]:
        """Return the description of a buffer that MPI's calls expect: its memory, the bytes of each part, and the type.
        shares: number of equal parts."""
        memory = self._memory(tensor)
        return [memory, memory.nbytes // shares, self._mpi.BYTE]

    def _check(self, tensor: torch.Tensor, tag: int) -> None:
        if (size := tensor.nbytes) > _MOST:
            raise ValueError(f"a message of {size:,} bytes: send at most {_MOST:,} at a time")
        if not 0 <= tag <= self._highest_tag:
            raise ValueError(f"tag {tag}: MPI takes tags from 0 to {self._highest_tag}")


class MpiMessage:
    """A message as a P2PWork; its transfer is a request of MPI."""

    def __init__(self, mpi: Mpi, tensor: torch.Tensor, request: Any, receives: bool) -> None:
        self._owner = mpi
        self._tensor = tensor  # the reference keeps the tensor's memory alive while MPI uses it
        self._request = request
        self._receives = receives
        self._status = mpi._mpi.Status()
        self._lock = threading.Lock()
        self._done = False
        self._error: Any = None

    @property
    def done(self) -> bool:
        """Whether the message is done or has failed; `wait` raises the error. May be called from any thread."""
        # MPI forgets a finished request and its status, so its completion must be seen only once, by one thread.
        with self._lock:
            if not self._done:
                try:
                    self._done = self._owner.test(self._request, self._status)
                except self._owner._mpi.Exception as error:
                    self._done, self._error = True, error
            return self._done

    @property
    def source(self) -> int:
        return int(self._status.Get_source())

    def wait(self, timeout: float) -> None:
        mpi = self._owner._mpi
        size = self._tensor.nbytes
        self._owner.until(lambda: self.done, timeout, "a message")
        if self._error is not None:
            if self._error.Get_error_class() == mpi.ERR_TRUNCATE:
                raise Mismatch(
                    f"a message is longer than the {size} bytes of the tensor that it was to fill"
                ) from self._error
            raise PeerLost(f"a message was not delivered: {self._error}") from self._error
        if self._receives and (count := self._status.Get_count(mpi.BYTE)) != size:
            raise Mismatch(f"a message has {count} bytes, and its tensor {size}")


def _told(key: int) -> str:
    size, root, verb = key >> 24, key >> 4 & 0xFFFFF, _VERBS[key & 0xF]
    if verb == "a broadcast":
        return f"{verb} of {size} bytes from rank {root}"
    return f"{verb} of {size} bytes" if size else verb


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(tensor.view(torch.uint8), _MOST) if tensor.numel() else ()
