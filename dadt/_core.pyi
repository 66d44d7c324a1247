"""Typed face of the C++ core. It knows pointers, counts and dtypes; never torch."""

from collections.abc import Sequence
from typing import Final

from typing_extensions import Buffer

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

class Reduction:
    """What an allreduce makes of the ranks' values."""

    mean: Reduction
    sum: Reduction
    min: Reduction
    max: Reduction
    product: Reduction
    @property
    def name(self) -> str: ...

BLOCK: Final[int]
"""Values that are compressed together."""

class Codec:
    """How a block of BLOCK values travels. int8, int4, bits2, bits1: with one float32 scale, its first four
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
        """Of so many values, the filling of the last block left out."""

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

class LinkCounts:
    """What the kernel counts for the connections with one rank."""

    @property
    def sent(self) -> int:
        """Bytes that have arrived at the other rank."""
    @property
    def received(self) -> int: ...
    @property
    def resent(self) -> int:
        """Bytes that were sent again; 0 before Linux 4.19."""
    @property
    def busy(self) -> float:
        """Seconds in which bytes were under way and the other rank had room for more."""
    @property
    def round_trip(self) -> float:
        """Seconds, at the last reading."""
    @property
    def queued(self) -> int:
        """Bytes that waited to be sent, at the last reading."""
    @property
    def at(self) -> float:
        """Time of the last reading, in seconds of the monotonic clock."""

class TcpExecutor(Executor):
    """TCP between ranks.

    data, notices: file descriptors of connected sockets by rank, which then belong to the executor: one or more for
    data, none at this rank's own place, and one for the reasons of failures, -1 there. Both ends must have proved
    themselves. silence: seconds after which a connection without an acknowledgment counts as broken, and somebody
    replaces what breaks; 0: a rank whose connections break is gone.
    """

    def __init__(
        self, rank: int, data: Sequence[Sequence[int]], notices: Sequence[int], silence: float = 0.0
    ) -> None: ...
    def await_break(self) -> int | None:
        """Wait until the connections with a rank break, and detach them. None once this rank is closed or aborted."""
    def detach(self, rank: int) -> int | None:
        """Give up the connections with a rank, unless that is done. Returns how many bytes of its data have come; None
        if either rank has ended."""
    def is_detached(self, rank: int) -> bool:
        """Whether the connections are given up, and others may still take their place."""
    def has_left(self, rank: int) -> bool:
        """Whether the rank has ended the connection for notices, too."""
    def attach(self, rank: int, data: Sequence[int], notices: int, received: int) -> bool:
        """Put other sockets in the place of those given up; the descriptors stay the caller's. received: how many bytes
        of this rank's data have come to the other. Waits until what is missing there of earlier operations is on its
        way. Returns False if no others are needed, or what is missing is not known any more."""
    def give_up(self, rank: int) -> None:
        """The rank is gone: nothing takes the connections' place."""
    def counts(self) -> list[LinkCounts]:
        """What the kernel has counted for the connections for data with each rank, by rank; read five times a second at
        most, while operations run."""

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
    def received(self) -> list[Buffer]:
        """After wait: what each rank has sent (exchange with receives None), by rank; a writable buffer of bytes
        that may be kept as long as one likes."""
    @property
    def weight_sum(self) -> float:
        """After wait: sum of all ranks' weights (allreduce)."""
    @property
    def seconds(self) -> float:
        """After wait: time from the moment that the last rank arrived until done, on this rank."""

class Job:
    """One operation pulled by a Python executor's thread; finish or fail it exactly once. One that is dropped fails."""

    @property
    def kind(self) -> str:
        """allreduce | broadcast | allgather | exchange"""
    @property
    def name(self) -> str: ...
    @property
    def layout(self) -> Layout | None:
        """None in an allgather. In an exchange: bytes that go to each rank."""
    @property
    def receives(self) -> Layout | None:
        """In an exchange: bytes that come from each rank; None: as many as they send, see `allocate`."""
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
        """Ranks whose weight is 1 where the others' is 0; 0: not known beforehand."""
    @property
    def root(self) -> int: ...
    @property
    def lane(self) -> bytes: ...
    def pack(self, destination: int, factor: float | None = None, spread: bool = False) -> None:
        """Write the inputs, times factor (None: their weight), to the address: one after the other (layout.total
        elements), or, spread, as the outputs lie in the flat buffer. Zeros where a tensor has no input. Releases the
        GIL."""
    def unpack(self, source: int, scale: float, spread: bool = False) -> None:
        """Write source times scale to the outputs; nothing where these are the source, and scale is 1. Releases the
        GIL."""
    @property
    def flat(self) -> int:
        """As given to `allreduce`."""
    @property
    def room(self) -> int:
        """As given to `allreduce`."""
    @property
    def spread_count(self) -> int:
        """Elements of the flat buffer up to the end of the last output; 0 without one."""
    @property
    def apart(self) -> bool:
        """Whether no input lies in the flat buffer."""
    def allocate(self, bytes: Sequence[int]) -> list[int]:
        """Addresses of memory for what each rank sends, which becomes Work.received at `finish`."""
    @property
    def codec(self) -> Codec: ...
    @property
    def owed(self) -> int:
        """As given to `allreduce`."""
    @property
    def keep(self) -> float: ...
    @property
    def plain(self) -> int:
        """Bytes of what it stands for."""
    def compress(self, begin: int, end: int, wire: int) -> None:
        """Write blocks [begin, end) of the inputs and what is owed; fewer where there are fewer. Releases the GIL."""
    def decompress(self, wires: Sequence[int], weights: Sequence[float] | None, divisor: float) -> None:
        """outputs = sum(weight * wire) / divisor, in float32. Releases the GIL."""
    def finish(
        self, lanes: Sequence[bytes], weight_sum: float, seconds: float, waited: float, sent: int = 0, plain: int = 0
    ) -> None:
        """sent: bytes that went to peers, of an allreduce; plain: that would have, uncompressed."""
    @property
    def unsure(self) -> bool:
        """The ranks may differ in what they submit, and must then all be told."""
    def fail(self, error: str, mismatch: bool = False) -> None:
        """The engine's sticky error becomes CommError(error), or Mismatch(error)."""

class Timeline:
    """What one rank did when, as events of Chrome's trace format. Any thread adds, one drains; memory is bounded.
    Times are those of time.perf_counter."""

    def __init__(self, rank: int, origin: float) -> None:
        """origin: what is time 0 in the events."""
    def step(self, number: int, begin: float, end: float, waits: Sequence[tuple[str, float, float]]) -> None:
        """waits: (for what, begin, end), in their order, in which the training thread stood still."""
    def drain(self, timeout: float) -> bytes:
        """Events since the last call, each a line that ends with a comma. Waits, without the GIL, until there are
        many, for `timeout` seconds at most, or until closed."""
    def close(self) -> None:
        """No drain waits from now on."""
    @property
    def dropped(self) -> int:
        """Events that were too many to keep until the next drain."""

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
        """Weighted mean over ranks: outputs = sum(weight_r * input_r) / sum(weight_r), in rank order, the same bits
        on every rank; or another reduction: sum of weight_r * input_r, or min, max or product of the inputs of the
        ranks whose weight is not 0. Addresses of contiguous memory, one per tensor of the layout; input 0: this
        rank has none (zeros); output 0: not delivered. An input may be the same address as its output. The caller
        keeps the memory alive, and the inputs unchanged, until the work is done. Lanes have equal length on all ranks.
        With integers a mean is truncated. If all weights are 0 they count as equal. Where all but some outputs are
        0 this is a reduce or a reduce-scatter: what is delivered nowhere on a rank is not computed there.

        codec: a mean or sum of floats travels so, and is summed in float32. owed: address of
        layout.total values of float32, zeros at first, kept alive as the inputs: what was lost so far, which is
        added, times `keep`, to what is sent, and becomes what is lost now.
        plain: bytes of what this stands for, where that is more; only counted.
        held: it has its place in the order, but neither it nor what comes after it begins before `release`; until
        then its inputs may still be written.
        flat: address of a buffer of `room` elements in which all outputs lie, in order, at the same places on all
        ranks, and nothing else does: an executor may reduce there, and use what is left of it.

        Without an executor of the core's, weights other than 1 need a lane, and a lane a mean or a sum.

        unsure: the ranks may differ in what they submit. Shared memory always compares that; other executors
        spend a round trip on it where they are asked to."""
    def release(self, work: Work) -> None:
        """Let a held operation begin. Any thread; does not block."""
    def broadcast(self, layout: Layout, tensors: Sequence[int], root: int, name: str, unsure: bool = False) -> Work: ...
    def allgather(self, data: bytes, name: str) -> Work:
        """Every rank's bytes, which may differ in length, in Work.lanes."""
    def exchange(
        self,
        sends: Sequence[tuple[int, int]],
        receives: Sequence[tuple[int, int]] | None,
        name: str,
        unsure: bool = False,
    ) -> Work:
        """Send bytes to each rank and receive some from each: (address, bytes) by rank, this one included.

        Sends may overlap one another. What a rank sends to another and what that one expects must be as long:
        Mismatch on every rank otherwise. receives None: as long as they are sent; Work.received. With it this is
        allgather, gather, scatter and alltoall, of equal or unequal lengths."""
    def pull(self, timeout: float) -> Job | None:
        """Next operation, for a Python executor; None after timeout or at close (then `closed` is true). Waits
        without the GIL. RuntimeError while the job before is neither finished nor failed."""
    def abort(self, reason: str, lost: bool = False) -> None:
        """Fail everything pending and to come with Aborted(reason), here and (shm) on the peers; lost: with
        PeerLost(reason). Any thread. In pull mode the job that was pulled fails at once, and its pack and unpack raise
        from then on."""
    def close(self, timeout: float) -> None:
        """Wait for what is pending, then stop the thread. Idempotent. CommTimeout if that took longer than
        `timeout`: the rest was aborted, then, and the engine is closed all the same."""
    def record(self, timeline: Timeline, track: int) -> None:
        """From now on, when which operation ran goes to the timeline, on the track (its thread's number). Once."""
    @property
    def sent(self) -> tuple[int, int]:
        """Bytes that this rank has sent in allreduces so far, and would have sent uncompressed."""
    @property
    def closed(self) -> bool: ...
    @property
    def error(self) -> str | None:
        """The sticky error, if any."""

class Ticket:
    """Handle to one named tensor."""

    @property
    def name(self) -> str: ...
    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float) -> None:
        """As Work.wait. Also raises Mismatch, for this tensor alone, where the ranks have submitted different ones."""
    def tell_that_it_is_waited_for(self) -> None:
        """What `wait` tells rank 0 before it blocks."""
    @property
    def operation(self) -> str | None:
        """The name of the operation that it went with; None before that is decided."""
    @property
    def received(self) -> list[Buffer]:
        """As Work.received."""
    @property
    def seconds(self) -> float:
        """As Work.seconds, of the operation that it went with."""
    @property
    def last_joined(self) -> int:
        """After wait, of a join: the rank that joined last; the same on all ranks."""

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
        """Of a tensor that all ranks have submitted: its group, not all of which they have. Else empty."""
    @property
    def group_has(self) -> int: ...
    @property
    def group_size(self) -> int: ...

class Notice:
    """On rank 0 a stall; elsewhere an order of rank 0's."""

    @property
    def stall(self) -> Stall | None: ...
    @property
    def order(self) -> str: ...

class ToldTime:
    """The time as whoever simulates ranks tells it."""

    def set(self, seconds: float) -> None: ...

class Negotiation:
    """Named tensors in any order, from any thread: brings them into one order on all ranks, fuses allreduces and
    gives them to an engine that has no other user.

    One thread, without the GIL, which sleeps while there is nothing to do. A mismatch fails that tensor alone; any
    other error sticks, and reaches all ranks. Inert in a forked child.
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
    ) -> None:
        """broadcaster: for broadcasts; the same engine, or another. sockets: descriptors of connected streams, taken
        over: on rank 0 of each rank (its own: -1), elsewhere of rank 0. cycle: seconds that a ready tensor waits for
        company; buffer_bytes: of a fused operation, 0: none. time: if given, there is no thread, and whoever simulates
        ranks calls `turn`. cache_capacity: names that rank 0 remembers."""
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
        """As Engine.allreduce. signature: text that must be equal on all ranks. Does not block. ValueError if the
        name is pending. group: its group_size members are decided together."""
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
        """This rank submits no more: it gives nothing to the others' allreduces, until all have joined."""
    def set_step(self, step: int) -> None: ...
    def abort(self, reason: str, lost: bool = False) -> None:
        """Fail everything pending and to come with Aborted(reason), on all ranks and in the engines; lost: with
        PeerLost(reason). Any thread."""
    def notices(self, timeout: float) -> list[Notice] | None:
        """Block without the GIL until there are some, or `timeout` seconds; None once closed."""
    def order(self, text: str) -> None:
        """On rank 0: a notice for all other ranks."""
    def close(self, timeout: float) -> None:
        """Wait until what is pending is decided, then take leave of the peers. Idempotent. CommTimeout if that took
        longer: the rest was aborted, then. The engine stays as it is."""
    def leave(self) -> None:
        """Take leave of the peers once what is pending is decided; does not block."""
    def turn(self) -> float | None:
        """Without a thread: do what there is to do now. Returns the seconds until there is more, unless a socket or a
        call comes first; None at the end."""
    def forsake(self) -> None:
        """In a forked child: close the connections."""
    @property
    def closed(self) -> bool: ...
    @property
    def error(self) -> str | None: ...

class P2PWork:
    """A message under way."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float) -> None:
        """Until the memory may be used again, without the GIL. Raises CommTimeout, naming the rank, after `timeout`
        seconds (the message is still under way, then), PeerLost, Mismatch where the lengths differ, and Aborted. Ctrl-C
        is seen within 0.1 s."""
    @property
    def source(self) -> int:
        """After wait, of a receive: the rank that has sent it."""

class Mailbox:
    """Messages between two ranks of a host through shared memory. Any thread; many may be under way.

    One pair and tag keeps its order, tags do not block one another. A thread of its own, started at the first use,
    moves what cannot go at once; it never takes the GIL. Inert in a forked child: sending raises RuntimeError.
    """

    def __init__(self, rank: int, world_size: int) -> None: ...
    def endpoint(self) -> bytes:
        """What the peers need to reach this rank; opaque."""
    def connect(self, endpoints: Sequence[bytes], timeout: float) -> None:
        """All ranks' endpoints, by rank. Raises CommTimeout naming the ranks that did not come."""
    def send(self, address: int, bytes: int, peer: int, tag: int) -> P2PWork:
        """The memory must live, unchanged, until the transit is done. A short message (32 KB) is done before it is
        received. peer may be this rank."""
    def receive(self, address: int, bytes: int, peer: int, tag: int) -> P2PWork:
        """As many bytes as are sent. The memory must live until the transit is done. peer -1: from whoever sends with
        this tag first."""
    def abort(self, reason: str, lost: bool = False) -> None:
        """Fail everything pending and to come with Aborted(reason), here and on the peers; lost: with
        PeerLost(reason). Any thread."""
    def close(self) -> None:
        """Fail what is pending here, and stop the thread. Idempotent."""

class TcpMailbox:
    """Messages between two ranks over TCP; see Mailbox.

    sockets: file descriptors of connected sockets by rank, -1 at this rank's own place, which then belong to the
    mailbox. Both ends must have proved themselves.
    """

    def __init__(self, rank: int, sockets: Sequence[int]) -> None: ...
    def counts(self) -> list[LinkCounts]:
        """What the kernel has counted for the connections with each rank; see TcpExecutor."""
    def send(self, address: int, bytes: int, peer: int, tag: int) -> P2PWork: ...
    def receive(self, address: int, bytes: int, peer: int, tag: int) -> P2PWork: ...
    def abort(self, reason: str, lost: bool = False) -> None: ...
    def close(self) -> None:
        """Wait up to 5 seconds until what was sent has gone out, fail what is pending here, and stop the thread.
        Idempotent."""

def reduce(
    dtype: DType,
    reduction: Reduction,
    destination: int,
    sources: Sequence[int],
    weights: Sequence[float] | None,
    divisor: float,
    count: int,
) -> None:
    """destination = what `reduction` makes of the sources (addresses of `count` elements each), in their order.

    A mean is sum(weights_r * source_r) / divisor, a sum the same with divisor 1; the others take no weights."""

def predict(
    dtype: DType, counts: Sequence[int], parameters: Sequence[int], displacements: Sequence[int], factor: float
) -> None:
    """Pairwise, in one pass: displacement = parameter + factor * displacement; by -1, how far a parameter has moved."""

class NextStep:
    """The next step of SGD or Adam, as factors. With g = expected + w * decay it leads the weights w to
    w * keep + (m * momentum + g * gradient) / (sqrt(v * square + g * g * squared) * root + epsilon)."""

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
    """Pairwise, in one pass over memory: ahead = parameter after a step with the gradient
    sum(weights_s * sources_s); without sources with the one that is in `ahead`.

    momenta, squares: 0 where there is none; without a square nothing is divided. sources: columns of addresses; 0,
    but not in all, where a tensor has none."""

def compress(codec: Codec, source: int, count: int, wire: int, owed: int = 0, keep: float = 1.0) -> None:
    """`count` values of float32 to the wire, in whole blocks; owed as of Engine.allreduce. Releases the GIL."""

def decompress(codec: Codec, wire: int, destination: int, count: int) -> None:
    """And back. Releases the GIL."""

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
    """wire = sum(weight * wires) / divisor, compressed again, of blocks that begin at value `first` of `total`. What
    that loses, times `share`, is added to what is owed (address of `total` values; 0: nowhere). Releases the GIL."""
