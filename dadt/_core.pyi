"""Type annotations of the C++ core, which knows memory addresses, counts and dtypes, but not torch."""

from collections.abc import Sequence
from typing import Final

from typing_extensions import Buffer

__version__: Final[str]
simd: Final[str]
"""Instruction set picked at run time: avx512, avx2, neon or scalar."""

class DType:
    """Element types. Sums of float16 and bfloat16 are computed in float32."""

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

class Reduction:
    """How an allreduce combines the ranks' values."""

    mean: Reduction
    sum: Reduction
    min: Reduction
    max: Reduction
    product: Reduction
    @property
    def name(self) -> str: ...

BLOCK: Final[int]
"""Number of values in a block, which are compressed together."""

class Codec:
    """How a block of BLOCK values is sent. int8, int4, bits2 and bits1 begin with one float32 scale in the first four
    bytes."""

    none: Codec
    bf16: Codec
    fp16: Codec
    int8: Codec
    int4: Codec
    bits2: Codec
    bits1: Codec
    @property
    def name(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...
    def wire_bytes(self, values: int) -> int:
        """Return the bytes that this number of values takes, without the padding of the last block."""

class Layout:
    """The tensors of one bucket: their element counts in order, and their dtype. Equal on all ranks."""

    def __init__(self, dtype: DType, counts: Sequence[int]) -> None: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def counts(self) -> list[int]: ...
    @property
    def total(self) -> int:
        """Number of elements of all tensors together."""

class Executor:
    """Moves bytes between ranks. Created by one thread, then owned and used by an Engine."""

    @property
    def name(self) -> str: ...
    def endpoint(self) -> bytes:
        """Return the opaque bytes with which the peers can reach this rank."""
    def connect(self, endpoints: Sequence[bytes], timeout: float) -> None:
        """Connect with all peers. endpoints: those of all ranks, ordered by rank. Raises CommTimeout, naming the
        missing ranks."""

class ShmExecutor(Executor):
    """Executor over shared memory between the ranks of one host. The segment has no name, so no file can remain."""

    def __init__(self, rank: int, world_size: int) -> None: ...

class LinkCounts:
    """The kernel's counts for all connections with one rank."""

    @property
    def sent(self) -> int:
        """Number of bytes that have arrived at the other rank."""
    @property
    def received(self) -> int: ...
    @property
    def resent(self) -> int:
        """Number of bytes that were sent again; 0 before Linux 4.19."""
    @property
    def busy(self) -> float:
        """Seconds in which bytes were under way and the other rank had room for more."""
    @property
    def round_trip(self) -> float:
        """Seconds of a round trip, at the last reading."""
    @property
    def queued(self) -> int:
        """Number of bytes that waited to be sent, at the last reading."""
    @property
    def at(self) -> float:
        """Time of the last reading, in seconds of the monotonic clock."""

class TcpExecutor(Executor):
    """Executor over TCP.

    sockets: file descriptors of connected sockets, by rank; the executor takes them over. For each other rank there is
    first one for notices, which carry the reasons of failures, then one for messages, which a TcpMailbox uses, and then
    one or more for data; at this rank's own index there are none. Both ends must have proved themselves. silence:
    seconds without an acknowledgment after which a connection counts as broken, if somebody replaces broken
    connections; 0: a rank whose connections break counts as lost.
    """

    def __init__(self, rank: int, sockets: Sequence[Sequence[int]], silence: float = 0.0) -> None: ...
    def await_break(self) -> int | None:
        """Wait until the connections with a rank break, detach them, and return the rank. Returns None once this
        executor is closed or aborted."""
    def detach(self, rank: int) -> tuple[int, int] | None:
        """Give up the connections with a rank, unless this was done already. Returns how many bytes of the rank's data
        and of its messages have arrived; None if either rank has ended."""
    def is_detached(self, rank: int) -> bool:
        """Return whether the connections with the rank were given up and can still be replaced."""
    def has_left(self, rank: int) -> bool:
        """Return whether the rank has also ended the connection for notices."""
    def attach(self, rank: int, sockets: Sequence[int], received: Sequence[int]) -> bool:
        """Replace the given-up connections with a rank; the caller keeps the ownership of the descriptors, which are
        ordered as before. received: how many bytes of this rank's data and of its messages the other rank has received.
        Waits until this rank has sent what the other rank lacks of earlier operations. Returns False if no connections
        are needed, or if the missing bytes are no longer known."""
    def give_up(self, rank: int) -> None:
        """Count the rank as lost: its connections are not replaced."""
    @property
    def group(self) -> int:
        """Number of ranks in a group, by which large averages go; it divides the number of ranks, and is that number
        where all go in one group."""
    def counts(self) -> list[LinkCounts]:
        """Return the kernel's counts for the data connections with each rank, by rank. They are read at most five times
        a second, while operations run."""

    def release(self) -> list[KeptLink | None]:
        """Give up the connections, once the engine and the TcpMailbox are closed. Returns by rank those that stand
        after a failure, for the next group."""

class KeptLink:
    """The connections with another rank, after a group of both has failed and before they form the next one."""

    def enter(self, generation: int) -> None:
        """Tell the other rank that this one enters a generation of ranks, and how many bytes it has written before."""
    def clear(self, generation: int, seconds: float) -> bool:
        """Drop what the other rank has written before it entered this generation, for so many seconds at most. Returns
        whether nothing of that is left, or the connection has ended, which its user will notice. Raises PeerLost if the
        other rank has entered a later generation."""
    def end(self) -> None:
        """End the connection, so that its user replaces it."""
    def take(self) -> list[int]:
        """Return the descriptors, which the caller then owns, in the order that TcpExecutor requires."""

class NullExecutor(Executor):
    """Executor that moves nothing and delivers the rank's own values: the fastest that any executor can be."""

    def __init__(self, rank: int, world_size: int) -> None: ...

class Work:
    """Handle of one operation."""

    @property
    def name(self) -> str: ...
    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float) -> None:
        """Block without the GIL until the operation is done. Raises the engine's first error (a dadt.errors.CommError),
        or CommTimeout after `timeout` seconds, while the operation still runs. Ctrl-C is noticed within 0.1 s."""
    @property
    def lanes(self) -> list[bytes]:
        """Every rank's lane (of an allreduce) or bytes (of an allgather), by rank; known after `wait`."""
    @property
    def received(self) -> list[Buffer]:
        """The bytes that each rank has sent (in an exchange with receives None), by rank; known after `wait`. Writable
        buffers, which may be kept for any time."""
    @property
    def weight_sum(self) -> float:
        """Sum of all ranks' weights in an allreduce; known after `wait`."""
    @property
    def seconds(self) -> float:
        """Seconds from the arrival of the last rank until this rank was done; known after `wait`."""

class Job:
    """One operation for a Python executor's thread, which must finish or fail it exactly once. A job that is dropped
    fails."""

    @property
    def kind(self) -> str:
        """Kind of operation: allreduce, broadcast, allgather or exchange."""
    @property
    def name(self) -> str: ...
    @property
    def layout(self) -> Layout | None:
        """Layout of the tensors; in an exchange, the numbers of bytes for each rank; None in an allgather."""
    @property
    def receives(self) -> Layout | None:
        """In an exchange, the numbers of bytes from each rank; None if they are whatever the ranks send, see
        `allocate`."""
    @property
    def inputs(self) -> list[int]: ...
    @property
    def outputs(self) -> list[int]: ...
    @property
    def reduction(self) -> Reduction: ...
    @property
    def weight(self) -> float: ...
    @property
    def participants(self) -> int:
        """Number of ranks of weight 1, if all others have weight 0; 0 if it is not known beforehand."""
    @property
    def root(self) -> int: ...
    @property
    def lane(self) -> bytes: ...
    def pack(self, destination: int, factor: float | None = None, spread: bool = False) -> None:
        """Write the inputs, times `factor` (None: their weight), to the address `destination`: one after the other
        (layout.total elements), or with `spread` as the outputs lie in the flat buffer. Tensors without an input become
        zeros. Releases the GIL."""
    def unpack(self, source: int, scale: float, spread: bool = False) -> None:
        """Write the values at the address `source`, times `scale`, to the outputs. Does nothing if the outputs are the
        source and `scale` is 1. Releases the GIL."""
    @property
    def flat(self) -> int:
        """The argument `flat` of `Engine.allreduce`."""
    @property
    def room(self) -> int:
        """The argument `room` of `Engine.allreduce`."""
    @property
    def spread_count(self) -> int:
        """Number of elements of the flat buffer up to the end of the last output; 0 without a flat buffer."""
    @property
    def apart(self) -> bool:
        """Whether no input lies in the flat buffer."""
    def allocate(self, bytes: Sequence[int]) -> list[int]:
        """Allocate memory for what each rank sends, and return the addresses. The memory becomes Work.received at
        `finish`."""
    @property
    def codec(self) -> Codec: ...
    @property
    def owed(self) -> int:
        """The argument `owed` of `Engine.allreduce`."""
    @property
    def keep(self) -> float: ...
    @property
    def plain(self) -> int:
        """The argument `plain` of `Engine.allreduce`, or the bytes of the values."""
    def compress(self, begin: int, end: int, wire: int) -> None:
        """Write the blocks [begin, end) of the inputs plus their residuals to the address `wire`; fewer blocks if there
        are fewer. Releases the GIL."""
    def decompress(self, wires: Sequence[int], weights: Sequence[float] | None, divisor: float) -> None:
        """Compute outputs = sum(weight * wire) / divisor, in float32. Releases the GIL."""
    def finish(
        self, lanes: Sequence[bytes], weight_sum: float, seconds: float, waited: float, sent: int = 0, plain: int = 0
    ) -> None:
        """Complete the operation. sent: bytes sent to peers in an allreduce. plain: bytes that would have been sent
        uncompressed."""
    @property
    def unsure(self) -> bool:
        """Whether ranks may submit different operations, so that all ranks have to be told about a difference."""
    def fail(self, error: str, mismatch: bool = False) -> None:
        """Fail the operation. The engine's permanent error becomes CommError(error), or Mismatch(error)."""

class Timeline:
    """Records the operations of one rank as events of Chrome's trace format, with times of time.perf_counter. Any
    thread adds events, one thread drains them, and memory is bounded."""

    def __init__(self, rank: int, origin: float) -> None:
        """origin: the time that becomes 0 in the events."""
    def step(self, number: int, begin: float, end: float, waits: Sequence[tuple[str, float, float]]) -> None:
        """Record a step of the training thread. waits: its waits in order, each with what it waited for, begin and
        end."""
    def drain(self, timeout: float) -> bytes:
        """Return the events since the last call, each as a line that ends with a comma. Waits, without the GIL, until
        there are many events, for at most `timeout` seconds, or until `close`."""
    def close(self) -> None:
        """Let `drain` return at once from now on."""
    @property
    def dropped(self) -> int:
        """Number of events that were discarded because too many came before the next drain."""

class Engine:
    """One thread with a queue of operations, which run in order on one executor. The first error is permanent: every
    pending and later Work fails with it.

    With an Executor, a C++ thread runs the operations and never takes the GIL. With None, a Python thread takes them by
    `pull`. In a forked child the engine is inert: no destructor joins a thread, and submitting raises RuntimeError.
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
        reduction: Reduction = ...,
        unsure: bool = False,
        codec: Codec = ...,
        owed: int = 0,
        keep: float = 1.0,
        plain: int = -1,
        held: bool = False,
        flat: int = 0,
        room: int = 0,
    ) -> Work:
        """Start a weighted mean over ranks: outputs = sum(weight_r * input_r) / sum(weight_r), in rank order, with the
        same bits on every rank; or another reduction: the sum of weight_r * input_r, or the min, max or product of the
        inputs of the ranks whose weight is not 0. inputs, outputs: addresses of contiguous memory, one per tensor of
        the layout. Input 0: this rank has no value (zeros); output 0: the result is not delivered. An input may have
        the same address as its output. The caller keeps the memory alive, and the inputs unchanged, until the work is
        done. Lanes have equal length on all ranks. Means of integers are truncated. If all weights are 0, they count as
        equal. With 0 for some outputs this is a reduce or a reduce-scatter: values that a rank does not deliver are not
        computed there.

        codec: compression of a mean or sum of floats, which is summed in float32. owed: address of layout.total float32
        values, kept alive like the inputs: the residual (compression error) so far, zeros at first. It is added, times
        `keep`, to the values that are sent, and overwritten by the error that this causes. plain: number of bytes of
        the values for which the inputs stand, if that is more; only counted. held: the operation has its place in the
        order, but neither it nor later ones begin before `release`; until then its inputs may still be written. flat:
        address of a buffer of `room` elements that contains exactly the outputs, in order, at the same places on all
        ranks: an executor may reduce there, and use the rest of the buffer.

        Without a C++ executor, weights other than 1 require a lane, and lanes require a mean or a sum.

        unsure: whether ranks may submit different operations. Shared memory always compares them; other executors spend
        a round trip on the comparison if `unsure` is set.
        """
    def release(self, work: Work) -> None:
        """Let a held operation begin. May be called from any thread; does not block."""
    def broadcast(self, layout: Layout, tensors: Sequence[int], root: int, name: str, unsure: bool = False) -> Work: ...
    def allgather(self, data: bytes, name: str) -> Work:
        """Start to gather every rank's bytes, which may differ in length, in Work.lanes."""
    def exchange(
        self,
        sends: Sequence[tuple[int, int]],
        receives: Sequence[tuple[int, int]] | None,
        name: str,
        unsure: bool = False,
    ) -> Work:
        """Start to send bytes to each rank and receive some from each: pairs of address and length, by rank, this rank
        included.

        Sends may overlap one another. If a rank sends another number of bytes than the receiver expects, every rank
        raises Mismatch. receives None: any number, which arrives in Work.received; this serves allgather, gather,
        scatter and alltoall, of equal or unequal lengths.
        """
    def pull(self, timeout: float) -> Job | None:
        """Return the next operation, for a Python executor; None after `timeout` seconds, or when the engine is closed
        (then `closed` is true). Waits without the GIL. Raises RuntimeError while the previous job is neither finished
        nor failed."""
    def abort(self, reason: str, lost: bool = False) -> None:
        """Fail all pending and later operations with Aborted(reason), on this rank and (with shared memory) on its
        peers; with `lost`, with PeerLost(reason). May be called from any thread. A job that was pulled fails at once,
        and its `pack` and `unpack` raise from then on."""
    def close(self, timeout: float) -> None:
        """Wait for pending operations, then stop the thread. May be called again. Raises CommTimeout if this takes
        longer than `timeout` seconds; the remaining operations were aborted then, and the engine is closed
        nevertheless."""
    def record(self, timeline: Timeline, track: int) -> None:
        """Record in the timeline when operations run, from now on. track: number of the track. Call it once."""
    @property
    def sent(self) -> tuple[int, int]:
        """Bytes that this rank has sent in allreduces so far, and bytes that it would have sent without compression."""
    @property
    def closed(self) -> bool: ...
    @property
    def error(self) -> str | None:
        """Text of the permanent error, or None."""

class Ticket:
    """Handle of the operation on one named tensor."""

    @property
    def name(self) -> str: ...
    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float) -> None:
        """Wait as Work.wait does. Also raises Mismatch, for this tensor only, if ranks have submitted different
        operations."""
    def tell_that_it_is_waited_for(self) -> None:
        """Report to rank 0 that a thread waits for this tensor, as `wait` does before it blocks."""
    @property
    def operation(self) -> str | None:
        """Name of the operation with which the tensor was fused; None before this is decided."""
    @property
    def received(self) -> list[Buffer]:
        """What Work.received is for the operation."""
    @property
    def seconds(self) -> float:
        """What Work.seconds is for the operation with which the tensor was fused."""
    @property
    def last_joined(self) -> int:
        """The rank that joined last, of the ticket that `join` returns; the same on all ranks, and known after
        `wait`."""

class Stall:
    """A tensor that some ranks have submitted and others have not."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def submitted(self) -> list[int]: ...
    @property
    def missing(self) -> list[int]: ...
    @property
    def steps(self) -> list[int]:
        """The last step known of each rank."""
    @property
    def group(self) -> str:
        """Name of the tensor's group, if all ranks have submitted the tensor but not the whole group; otherwise
        empty."""
    @property
    def group_has(self) -> int: ...
    @property
    def group_size(self) -> int: ...

class Notice:
    """A notice for one rank: on rank 0 a stall, on other ranks an order of rank 0."""

    @property
    def stall(self) -> Stall | None: ...
    @property
    def order(self) -> str: ...

class ToldTime:
    """A clock that tests set, in place of the real one."""

    def set(self, seconds: float) -> None: ...

class Negotiation:
    """Collectives on named tensors, submitted in any order and from any thread: brings them into one order on all
    ranks, fuses allreduces, and gives them to an engine that has no other user.

    One thread, without the GIL, which sleeps while there is nothing to do. A mismatch fails the tensor concerned only;
    any other error is permanent and reaches all ranks. Inert in a forked child.
    """

    def __init__(
        self,
        engine: Engine,
        broadcaster: Engine,
        rank: int,
        world_size: int,
        sockets: Sequence[int],
        cycle: float,
        buffer_bytes: int,
        group_buffer_bytes: int,
        stall_warning: float,
        time: ToldTime | None = None,
        cache_capacity: int = 4096,
        silence: float = 0.0,
    ) -> None:
        """broadcaster: engine for broadcasts, which may be the same one. sockets: descriptors of connected streams,
        which this object takes over: on rank 0 one for each rank (-1 for itself), on other ranks the one to rank 0.
        cycle: seconds that a ready tensor waits to be fused with others. buffer_bytes: largest size of a fused
        operation; 0: none is fused. time: if given, there is no thread, and the caller, which simulates ranks, calls
        `turn`. cache_capacity: number of names that rank 0 remembers. silence: seconds without an acknowledgment after
        which a connection counts as broken, if somebody replaces broken connections; 0: a rank whose connection breaks
        counts as lost."""
    def allreduce(
        self,
        name: str,
        signature: str,
        layout: Layout,
        inputs: Sequence[int],
        outputs: Sequence[int],
        reduction: Reduction,
        group: str = "",
        group_size: int = 0,
    ) -> Ticket:
        """Start an allreduce like Engine.allreduce, without blocking. signature: text that must be equal on all
        ranks. Raises ValueError if the name is pending. group: name of a set of group_size tensors that are started
        together."""
    def broadcast(
        self,
        name: str,
        signature: str,
        layout: Layout,
        tensors: Sequence[int],
        root: int,
        group: str = "",
        group_size: int = 0,
    ) -> Ticket: ...
    def exchange(
        self,
        name: str,
        signature: str,
        sends: Sequence[tuple[int, int]],
        receives: Sequence[tuple[int, int]] | None,
        group: str = "",
        group_size: int = 0,
    ) -> Ticket: ...
    def join(self) -> Ticket:
        """Announce that this rank submits no more tensors: it adds nothing to the allreduces of the other ranks until
        all ranks have joined."""
    def set_step(self, step: int) -> None: ...
    def abort(self, reason: str, lost: bool = False) -> None:
        """Fail all pending and later operations with Aborted(reason), on all ranks and in the engines; with `lost`,
        with PeerLost(reason). May be called from any thread."""
    def notices(self, timeout: float) -> list[Notice] | None:
        """Return new notices. Blocks without the GIL until there are some, for at most `timeout` seconds; None once
        closed."""
    def order(self, text: str) -> None:
        """Send a notice with this text to all other ranks; only on rank 0."""
    def close(self, timeout: float) -> None:
        """Wait until all pending tensors are decided, then say goodbye to the peers. May be called again. Raises
        CommTimeout if this takes longer than `timeout` seconds; the rest was aborted then. Does not change the
        engine."""
    def leave(self) -> None:
        """Say goodbye to the peers once all pending tensors are decided; does not block."""
    def turn(self) -> float | None:
        """Do what is due now, if there is no thread. Returns the seconds until more is due, unless a socket or a call
        comes first; None at the end."""
    def await_break(self) -> int | None:
        """Wait until the connection with a rank breaks, and return the rank. Returns None once this negotiation has
        ended. For this method and the next ones see TcpExecutor."""
    def detach(self, rank: int) -> Sequence[int] | None: ...
    def is_detached(self, rank: int) -> bool: ...
    def has_left(self, rank: int) -> bool: ...
    def attach(self, rank: int, sockets: Sequence[int], received: Sequence[int]) -> bool: ...
    def give_up(self, rank: int) -> None: ...
    def forsake(self) -> None:
        """Close the connections in a forked child."""
    @property
    def closed(self) -> bool: ...
    @property
    def error(self) -> str | None: ...

class P2PWork:
    """A message being sent or received."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float) -> None:
        """Wait, without the GIL, until the message's memory may be used again. Raises CommTimeout, naming the rank,
        after `timeout` seconds (the message is still under way then), PeerLost, Mismatch if the lengths differ, and
        Aborted. Ctrl-C is noticed within 0.1 s."""
    @property
    def source(self) -> int:
        """The rank that sent a received message; known after `wait`."""

class Mailbox:
    """Messages between two ranks of a host through shared memory. Methods may be called from any thread, and many
    messages may be under way.

    Messages of one pair of ranks and tag keep their order; tags do not block one another. A thread, started at the
    first use, moves what cannot be moved at once; it never takes the GIL. Inert in a forked child, where sending raises
    RuntimeError.
    """

    def __init__(self, rank: int, world_size: int) -> None: ...
    def endpoint(self) -> bytes:
        """Return the opaque bytes with which the peers can reach this rank."""
    def connect(self, endpoints: Sequence[bytes], timeout: float) -> None:
        """Connect with all peers. endpoints: those of all ranks, ordered by rank. Raises CommTimeout, naming the
        missing ranks."""
    def send(self, address: int, bytes: int, peer: int, tag: int) -> P2PWork:
        """Start to send memory, which must stay alive and unchanged until the work is done. A short message (32 KB) is
        done before it is received. peer: may be this rank."""
    def receive(self, address: int, bytes: int, peer: int, tag: int) -> P2PWork:
        """Start to receive as many bytes as are sent, into memory that must stay alive until the work is done. peer:
        the sending rank; -1 takes the first message with this tag."""
    def abort(self, reason: str, lost: bool = False) -> None:
        """Fail all pending and later messages with Aborted(reason), on this rank and its peers; with `lost`, with
        PeerLost(reason). May be called from any thread."""
    def close(self) -> None:
        """Fail this rank's pending messages, and stop the thread. May be called again."""

class TcpMailbox:
    """Messages between two ranks over TCP, with the methods of Mailbox, on the connections of an executor."""

    def __init__(self, beside: TcpExecutor) -> None: ...
    def counts(self) -> list[LinkCounts]:
        """Return the kernel's counts for the connections with each rank, as TcpExecutor.counts does."""
    def send(self, address: int, bytes: int, peer: int, tag: int) -> P2PWork: ...
    def receive(self, address: int, bytes: int, peer: int, tag: int) -> P2PWork: ...
    def abort(self, reason: str, lost: bool = False) -> None: ...
    def close(self) -> None:
        """Wait up to 5 seconds until sent messages have left, fail this rank's pending ones, and stop the thread. May
        be called again."""

def reduce(
    dtype: DType,
    reduction: Reduction,
    destination: int,
    sources: Sequence[int],
    weights: Sequence[float] | None,
    divisor: float,
    count: int,
) -> None:
    """Write the reduction of the sources (addresses of `count` elements each), in their order, to `destination`.

    A mean is sum(weights_r * source_r) / divisor; a sum is the same with divisor 1; other reductions take no weights.
    """

def predict(
    dtype: DType, counts: Sequence[int], parameters: Sequence[int], displacements: Sequence[int], factor: float
) -> None:
    """Overwrite each displacement with parameter + factor * displacement, in one pass over memory. With factor -1,
    weights before a step become the distance that the step has moved them."""

class NextStep:
    """Factors of the next step of SGD or Adam. With g = expected + w * decay, the step changes the weights w to w *
    keep + (m * momentum + g * gradient) / (sqrt(v * square + g * g * squared) * root + epsilon)."""

    def __init__(
        self,
        *,
        momentum: float,
        gradient: float,
        decay: float,
        keep: float,
        square: float,
        squared: float,
        root: float,
        epsilon: float,
    ) -> None: ...

def foresee(
    dtype: DType,
    counts: Sequence[int],
    parameters: Sequence[int],
    ahead: Sequence[int],
    momenta: Sequence[int],
    squares: Sequence[int],
    step: NextStep,
    sources: Sequence[Sequence[int]],
    weights: Sequence[float],
) -> None:
    """Write each parameter's weights after a step to `ahead`, in one pass over memory. The step uses the gradient
    sum(weights_s * sources_s); without sources, the one that is in `ahead`.

    momenta, squares: addresses of the optimizer's state, 0 if there is none; without a square nothing is divided.
    sources: one list of addresses per source, 0 if that source lacks the tensor. At least one source must have it.
    """

class MomentStep:
    """Factors of Adam's next step t. fresh: 1 - beta1. rest: 1 - beta2^t, by which Adam divides v. growth: by how much
    this has grown since the step before."""

    def __init__(self, *, fresh: float, beta2: float, rest: float, growth: float) -> None: ...

def confine(
    dtype: DType,
    counts: Sequence[int],
    squares: Sequence[int],
    momenta: Sequence[int],
    gradients: Sequence[int],
    step: MomentStep,
) -> None:
    """Set each second moment v to (max(v * growth, m^2 * rest) - (1 - beta2) * gradient^2) / beta2, in one pass over
    memory, where m is the momentum after Adam's coming step. Releases the GIL."""

def compress(codec: Codec, source: int, count: int, wire: int, owed: int = 0, keep: float = 1.0) -> None:
    """Compress `count` float32 values to the address `wire`, in whole blocks. owed: as for Engine.allreduce. Releases
    the GIL."""

def decompress(codec: Codec, wire: int, destination: int, count: int) -> None:
    """Write the float32 values of compressed blocks to `destination`. Releases the GIL."""

def combine(
    codec: Codec,
    wires: Sequence[int],
    weights: Sequence[float] | None,
    divisor: float,
    first: int,
    total: int,
    blocks: int,
    wire: int,
    owed: int,
    share: float,
) -> None:
    """Compute sum(weight * wires) / divisor and compress it again to the address `wire`, for `blocks` blocks that begin
    at value `first` of `total`. The compression's error, times `share`, is added to the residual (`owed`: address of
    `total` values, or 0). Releases the GIL."""
