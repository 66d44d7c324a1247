"""Executor over a CUDA-aware MPI, which reads and writes GPU memory itself, so that tensors are averaged where they
are. A separate thread waits for MPI.

As with NCCL, step metadata and weights travel through host memory.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch

from dadt import _core
from dadt.comm.executors import mpi, pull
from dadt.comm.executors.base import Connection, beside
from dadt.comm.executors.device import Averaging, Device
from dadt.comm.executors.meet import Meet
from dadt.comm.executors.mpi_process import process
from dadt.config import Config
from dadt.errors import CommTimeout, ConfigError
from dadt.world import World

END_SECONDS = 5.0


def connect(config: Config, world: World, meet: Meet) -> Connection:
    """Connect all ranks by CUDA-aware MPI. Raises ConfigError if there is no GPU or no usable MPI, if the library says
    it was built without CUDA, or if it allows one thread at a time only."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "executor mpicuda: torch sees no CUDA device here -> run where nvidia-smi shows one, or --executor mpi"
        )
    join = mpi.joiner(config, world, meet)
    everyone = range(world.world_size)
    if reads_gpus(process.path) is False:
        raise ConfigError(
            f"executor mpicuda: {process.library} is built without CUDA -> give one that is built with it by --mpirun, "
            "or --executor mpi"
        )
    if process.takes_one_thread:
        raise ConfigError(
            f"executor mpicuda: {process.library} takes one thread at a time -> give one with MPI_THREAD_MULTIPLE by "
            "--mpirun, or --executor mpi"
        )
    host = pull.connect(join(everyone), world.rank, world.world_size, config.timeout)
    gpu = torch.device("cuda", torch.cuda.current_device())
    device = ThreadedDevice(join(everyone), host.engine, gpu, world.rank, world.world_size)
    return beside(host, device)


def reads_gpus(path: str) -> bool | None:
    """Return whether the MPI library at this path accepts GPU memory addresses; None if it does not say."""
    try:
        ask = ctypes.CDLL(path).MPIX_Query_cuda_support
    except (AttributeError, OSError):
        return None
    ask.restype = ctypes.c_int
    return bool(ask())


class ThreadedDevice(Device):
    """A Device over MPI, which does not use CUDA streams: a separate thread waits for the GPU and calls MPI, so that
    the training thread waits for neither."""

    def __init__(
        self, executor: mpi.Mpi, engine: _core.Engine, device: torch.device, rank: int, world_size: int
    ) -> None:
        """executor: nothing else may use it. engine: C++ engine that carries the ranks' weights and step metadata
        through host memory."""
        super().__init__(Blocking(executor), engine, device, rank, world_size)
        self._orders: queue.SimpleQueue[tuple[Future[None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._summed: Future[None] = Future()
        # A daemon thread, so that a peer that never joins cannot keep this process from exiting.
        self._thread = threading.Thread(target=self._run, name="dadt-mpicuda", daemon=True)
        self._thread.start()

    def _sum(self, *order: Any) -> None:
        self._summed = Future()
        self._orders.put((self._summed, order))

    def _handle(self, *of_averaging: Any) -> Averaging:
        return ThreadedAveraging(self._summed, self, *of_averaging)

    def _run(self) -> None:
        while (next_ := self._orders.get()) is not None:
            summed, order = next_
            try:
                super()._sum(*order)
            except Exception as error:  # noqa: BLE001 (whatever the library raises belongs to the operation)
                summed.set_exception(error)
                self._engine.abort(f"MPI failed on the GPU: {type(error).__name__}: {error}")
            else:
                summed.set_result(None)

    def close(self, failed: bool) -> None:
        if failed:
            self._executor.abort()
        self._orders.put(None)
        self._thread.join(END_SECONDS)
        if not self._thread.is_alive():
            self._executor.close()


class ThreadedAveraging(Averaging):
    """Work handle of one average over MPI. `wait` waits for MPI's thread; then the sum, divided by the sum of weights,
    is on the current CUDA stream."""

    def __init__(self, summed: Future[None], *of_averaging: Any) -> None:
        super().__init__(*of_averaging)
        self._summed = summed

    @property
    def done(self) -> bool:
        return self._summed.done() and super().done

    @property
    def seconds(self) -> float:
        return super().seconds if self._summed.done() else self._work.seconds

    def wait(self, timeout: float) -> None:
        self._work.wait(timeout)
        try:
            self._summed.result(timeout)
        except FutureTimeout:
            raise CommTimeout(f"{self.name}: MPI was not done on the GPU within {timeout:g} s") from None
        super().wait(timeout)


class Blocking:
    """MPI's blocking calls with the interface of Starter, whose calls are asynchronous. Each call is done when it
    returns, so `wait` does nothing."""

    means = False

    def __init__(self, executor: mpi.Mpi) -> None:
        self._executor = executor

    def start(self, flat: torch.Tensor) -> Blocking:
        self._executor.allreduce(torch.view_as_real(flat).flatten() if flat.is_complex() else flat, "sum")
        return self

    def alltoall(self, sent: torch.Tensor, received: torch.Tensor) -> Blocking:
        ranks = self._executor.world_size
        self._executor.exchange(sent.view(-1).chunk(ranks), received.view(-1).chunk(ranks))
        return self

    def gather(self, mine: torch.Tensor, all: torch.Tensor) -> Blocking:
        self._executor.allgather(mine.view(-1), all.view(-1))
        return self

    def wait(self) -> None: ...

    def abort(self) -> None:
        self._executor.abort()

    def close(self) -> None:
        self._executor.close()
