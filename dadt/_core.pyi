"""Typed face of the C++ core. It knows pointers, counts and dtypes; never torch."""

from collections.abc import Sequence
from typing import Final

__version__: Final[str]
simd: Final[str]
"""Instruction set picked at run time: avx512, avx2, neon or scalar."""

class DType:
    """Element types. Sums of float16 and bfloat16 are made in float32."""

    float32: DType
    float64: DType
    float16: DType
    bfloat16: DType
    int64: DType
    int32: DType
    int16: DType
    int8: DType
    uint8: DType
    @property
    def name(self) -> str: ...
    @property
    def itemsize(self) -> int: ...

class Layout:
    """Which tensors make up one bucket: element counts in order, one dtype. The same on all ranks."""

    def __init__(self, dtype: DType, counts: Sequence[int]) -> None: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def counts(self) -> list[int]: ...
    @property
    def total(self) -> int:
        """Elements in all."""

class Executor:
    """Moves bytes between ranks. Made by one thread, then owned and used by an Engine."""

    @property
    def name(self) -> str: ...
    def endpoint(self) -> bytes:
        """What the peers need to reach this rank; opaque."""
    def connect(self, endpoints: Sequence[bytes], timeout: float) -> None:
        """All ranks' endpoints, by rank. Raises CommTimeout naming the ranks that did not come."""

class ShmExecutor(Executor):
    """Shared memory between the ranks of one host. The segment has no name, so nothing can be left behind."""

    def __init__(self, rank: int, world_size: int) -> None: ...

class NullExecutor(Executor):
    """Moves nothing: delivers the rank's own values. The limit that everything is measured against."""

    def __init__(self, rank: int, world_size: int) -> None: ...

class Work:
    """Handle to one operation."""

    @property
    def name(self) -> str: ...
    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float) -> None:
        """Block without the GIL until done. Raises the engine's first error (a dadt.errors.CommError),
        or CommTimeout after `timeout` seconds; the operation then still runs. Ctrl-C is seen within 0.1 s."""
    @property
    def lanes(self) -> list[bytes]:
        """After wait: every rank's lane (allreduce) or bytes (allgather), by rank."""
    @property
    def weight_sum(self) -> float:
        """After wait: sum of all ranks' weights (allreduce)."""
    @property
    def seconds(self) -> float:
        """After wait: time from the moment that the last rank arrived until done, on this rank."""
    @property
    def waited(self) -> float:
        """After wait: time that the operation spent waiting for the last rank to arrive."""

class Job:
    """One operation pulled by a Python executor's thread; finish or fail it exactly once. One that is dropped fails."""

    @property
    def kind(self) -> str:
        """allreduce | broadcast | allgather"""
    @property
    def name(self) -> str: ...
    @property
    def layout(self) -> Layout | None: ...
    @property
    def weight(self) -> float: ...
    @property
    def root(self) -> int: ...
    @property
    def lane(self) -> bytes: ...
    def pack(self, destination: int) -> None:
        """Write the inputs, times weight, one after the other at the address (layout.total elements; zeros
        where a tensor has no input). Releases the GIL."""
    def unpack(self, source: int, scale: float) -> None:
        """Write source times scale to the outputs. Releases the GIL."""
    def finish(self, lanes: Sequence[bytes], weight_sum: float, seconds: float, waited: float) -> None: ...
    def fail(self, error: str) -> None:
        """The engine's sticky error becomes CommError(error)."""

class Engine:
    """One thread, one FIFO, one executor. The first error sticks: every pending and later Work fails with it.

    With an Executor, a C++ thread runs the operations and never takes the GIL. With None, a Python thread pulls
    them with `pull`. Inert in a forked child: no destructor joins, and submitting raises RuntimeError.
    """

    def __init__(self, executor: Executor | None, rank: int, world_size: int, timeout: float) -> None:
        """timeout: seconds that one operation may wait for a peer before it fails with CommTimeout."""
    def allreduce(
        self,
        layout: Layout,
        inputs: Sequence[int],
        outputs: Sequence[int],
        name: str,
        weight: float = 1.0,
        lane: bytes = b"",
    ) -> Work:
        """Weighted mean over ranks: outputs = sum(weight_r * input_r) / sum(weight_r), in rank order, the same bits
        on every rank. Addresses of contiguous memory, one per tensor of the layout; input 0: this rank has none
        (zeros); output 0: not delivered. An input may be the same address as its output. The caller keeps the
        memory alive, and the inputs unchanged, until the work is done. Lanes have equal length on all ranks.
        Floating dtypes; with integers the weighted sum is divided and truncated. If all weights are 0 they count
        as equal."""
    def broadcast(self, layout: Layout, tensors: Sequence[int], root: int, name: str) -> Work: ...
    def allgather(self, data: bytes, name: str) -> Work:
        """Every rank's bytes, which may differ in length, in Work.lanes."""
    def pull(self, timeout: float) -> Job | None:
        """Next operation, for a Python executor; None after timeout or at close (then `closed` is true). Waits
        without the GIL. RuntimeError while the job before is neither finished nor failed."""
    def abort(self, reason: str) -> None:
        """Fail everything pending and to come with Aborted(reason), here and (shm) on the peers. Any thread.
        In pull mode the job that was pulled fails at once, and its pack and unpack raise from then on."""
    def close(self, timeout: float) -> None:
        """Wait for what is pending, then stop the thread. Idempotent. CommTimeout if that took longer than
        `timeout`: the rest was aborted, then, and the engine is closed all the same."""
    @property
    def closed(self) -> bool: ...
    @property
    def error(self) -> str | None:
        """The sticky error, if any."""

def predict(
    dtype: DType, counts: Sequence[int], parameters: Sequence[int], displacements: Sequence[int], factor: float
) -> None:
    """Pairwise, in one pass: parameter, displacement = parameter + factor * displacement, parameter."""

def displace(dtype: DType, counts: Sequence[int], parameters: Sequence[int], before: Sequence[int]) -> None:
    """Pairwise, in one pass: before = parameter - before."""
