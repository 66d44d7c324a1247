"""Predicts how long a training step takes under each algorithm, by the alpha-beta model of communication and
measurements.

A message of M bytes between two hosts takes alpha + M / B seconds: alpha is the latency, B the bandwidth of a host's
link in each direction (Hockney 1994). With h hosts, and on each host o seconds per operation and g seconds per byte for
handling the data, an exchange takes:

    allreduce, ring (Patarasuk and Yuan 2009)    T(M) = o + 2 (h - 1) alpha + 2 (h - 1) / h  M / B + g M
    compressed: alltoall, then allgather         T(M) = o + h alpha + 2 (h - 1) / h  w M / B + g' M
                                                 w: bytes sent per byte: bf16, fp16 1/2; int8 (256 + 4) / 1024;
                                                 int4 (128 + 4) / 1024, momentum:N (32 N + 4) / 1024, and
                                                 every 50 steps int8 (comm/executors/compressed.py, train/momentum.py)
    up to 32 KiB: all data goes to all hosts     T(M) = o + (h - 1) alpha + (h - 1) M / B + g M
    hierarchical: the same, with hosts as ranks, because a host's workers share its link; alpha is paid per 4 MiB

PowerSGD of rank r averages two factors of each n x m matrix, first one of r n values, then one of r m values. Tensors
that are not matrices are sent uncompressed, together with the first factor.

With C the compute time of a step (forward, then backward) and X the sum of T over all buckets, a step takes:

    sync     each bucket is exchanged when backward has completed it, one after the other; training waits for the last
    pipe     max(C, X) (arXiv:1811.03619); with PowerSGD, X has both factors, and C includes PowerSGD's computation
    local    (H/2 C + max(H/2 C, X)) / H for rounds of H steps, since an average has half a round to arrive; with Adam
             C + X / H in the rounds that `auto` would choose, since they wait for it
    gossip   C, since no rank waits. An exchange takes 2 (alpha + m / B) + 2 s + t: a request and an answer of m bytes
             follow each other, each takes s seconds to compute, and both are applied in t seconds; at most one
             exchange begins in each step

If computing uses all cores of a worker, the processor time of exchanges in the background is added to C. C is measured
for each algorithm with the null executor, which transfers nothing, and excludes packing, which is part of T. The model
leaves out ranks of unequal speed, and switches that carry less than all links together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dadt.algorithms.auto import choice, ways
from dadt.algorithms.auto.ways import Choice, Shown
from dadt.comm.compression import OF_MOMENTUM

SMALL = 32 * 1024
"""Largest size in bytes for which an allreduce is done as an allgather (dadt/comm/executors/pull.py)."""
WIRE = {**ways.WIRE, **{name: ways.WIRE[name] + ways.REFRESHED for name in OF_MOMENTUM}}
"""Bytes sent for each byte of float32, by compression."""
CHUNK = 4 << 20
"""Bytes of one chunk: the hierarchical executor exchanges the data of an allreduce in chunks of this size."""
ALGORITHMS = ("sync", "pipe", "local", "gossip")
"""The algorithms, ordered from the one that changes the training least (docs/algorithms.md)."""
COMPRESSIONS = ("none", "bf16", "int8", "int4", "momentum:2", "momentum:1", "powersgd:4")
ALONE = ("local", "gossip")
"""Algorithms under which ranks send no momentum, since they exchange weights."""
HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class NetworkSpeed:
    """Measured latency and bandwidth of the network between hosts."""

    alpha: float
    """Seconds that the shortest message takes one way."""
    bandwidth: float
    """Bytes per second of a host's link, in each direction at once."""


@dataclass(frozen=True, slots=True)
class Handling:
    """The costs of an exchange with one compression that do not depend on the network."""

    each: float
    """Seconds of each operation, independent of its size (o in the module's formulas)."""
    per_byte: float
    """Seconds for each byte of the gradients (g in the module's formulas)."""
    processor: float
    """Processor seconds used for each byte of the gradients."""


@dataclass(frozen=True, slots=True)
class LowRankBytes:
    """Bytes of the two factors that PowerSGD averages, one after the other, in place of one bucket."""

    first: int
    second: int


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The costs of a `gossip` exchange at one of its two ends, for one compression."""

    bytes: float
    """Bytes of one message between two neighbours."""
    say: float
    """Processor seconds to prepare a message before it is sent."""
    settle: float
    """Processor seconds to process the other end's message after it has arrived."""


@dataclass(frozen=True, slots=True)
class BucketCost:
    """A bucket of gradients, which are exchanged together."""

    bytes: int
    ready: float
    """Share of the backward pass after which all gradients of the bucket are complete."""
    low_rank: LowRankBytes | None = None


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Measurements of a model and of the machines that train it, from which the time of a step is predicted."""

    network: NetworkSpeed
    handling: Mapping[str, Handling]
    """The costs of exchanges that do not depend on the network, by compression; there is no entry for powersgd."""
    buckets: Sequence[BucketCost]
    """The buckets in the order in which they are exchanged."""
    buffers: Sequence[int]
    """Bytes of each exchange of BatchNorm statistics."""
    forward: float
    """Share of a step's compute time that the forward pass takes."""
    backward: float
    compute: Mapping[str, float]
    """Seconds of a step by algorithm, measured with the null executor, which transfers nothing, and without packing
    gradients."""
    packing: float
    """Seconds to pack one byte of gradients into a bucket."""
    low_rank: float
    """Seconds of PowerSGD's own computation in a step."""
    link_costs: Mapping[str, LinkCost]
    """The costs of a `gossip` exchange at one of its two ends, by compression."""
    mail: float
    """Processor seconds to send one byte to another worker and to receive one byte from it."""
    busy: float
    """Share of a step in which computing uses all cores of a worker; 0 if a core is free for communication."""
    chunked: bool
    """Whether the executor is hierarchical, which exchanges data in chunks."""
    sync_every: int

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self.buckets)


def options(way: Choice) -> list[str]:
    """Return options of `dadt run` that choose this way."""
    rounds = ["--sync-every", str(way.every)] if way.every else []
    rounds += ["--overlap-steps", "0"] if way.at_once else []
    return ["--algorithm", way.algorithm, "--compression", way.compression, *rounds]


def ways_of(sync_every: int, shown: Shown) -> list[Choice]:
    """Return the ways to predict: each algorithm with each compression, and `local` with each length of its rounds that
    `auto` chooses from. sync_every: the length of rounds that the user has set. shown: what is known of the
    optimizer."""
    found = [
        Choice(algorithm, compression, sync_every if algorithm == "local" else 0)
        for algorithm in ALGORITHMS
        for compression in COMPRESSIONS
        if not (algorithm in ALONE and compression in OF_MOMENTUM)
    ]
    rounds = [way for way in shown.costs if way.every and way not in found]
    return sorted([*found, *rounds], key=lambda way: ALGORITHMS.index(way.algorithm))


def allreduce(figures: MeasuredCosts, size: int, compression: str, hosts: int) -> float:
    """Return the predicted seconds of one allreduce of `size` bytes of float32."""
    network, handling = figures.network, figures.handling[compression]
    own = handling.each + handling.per_byte * size
    if hosts == 1:
        return own
    wire = WIRE[compression] * size
    if size <= SMALL:
        return own + (hosts - 1) * (network.alpha + wire / network.bandwidth)
    steps = 2 * (hosts - 1) if compression == "none" else hosts
    chunks = -(-size // CHUNK) if figures.chunked else 1
    return own + chunks * steps * network.alpha + 2 * (hosts - 1) / hosts * wire / network.bandwidth


def seconds(figures: MeasuredCosts, way: Choice, hosts: int) -> float:
    """Return the predicted seconds of one training step on `hosts` hosts."""
    if way.algorithm == "local":
        return _local(figures, way, hosts)
    predict = {"sync": _sync, "pipe": _pipe, "gossip": _gossip}[way.algorithm]
    return predict(figures, way.compression, hosts)


def rates(figures: MeasuredCosts, hosts: Sequence[int], shown: Shown) -> dict[Choice, list[float]]:
    """Return the predicted steps per second of each way, for each number of hosts. shown: what is known of the
    optimizer."""
    ways = ways_of(figures.sync_every, shown)
    return {way: [1.0 / seconds(figures, way, count) for count in hosts] for way in ways}


def best(found: Mapping[Choice, float], shown: Shown) -> Choice:
    """Return the way that `auto` would choose. found: rate of each way."""
    return choice.best({way: 1.0 / found[way] for way in shown.costs if way in found}, shown.costs, shown.doubling)


def _sync(figures: MeasuredCosts, compression: str, hosts: int) -> float:
    compute = figures.compute["sync"]
    begin, length = compute * figures.forward, compute * figures.backward
    codec, low_rank = _codec(compression)
    under_way, busy = 0.0, 0.0
    for number, bucket in enumerate(figures.buckets):
        last = number == len(figures.buckets) - 1
        ready = begin + length * (1.0 if last else bucket.ready) + busy
        if last:
            under_way = max(under_way, ready) + _buffers(figures, hosts)
        size = bucket.low_rank.first if low_rank and bucket.low_rank else bucket.bytes
        under_way = max(under_way, ready) + allreduce(figures, size, codec, hosts)
        busy += 0.0 if last else _stolen(figures, size, codec)
    rest = compute * (1.0 - figures.forward - figures.backward)
    return under_way + rest + (figures.low_rank + _second(figures, hosts) if low_rank else 0.0)


def _pipe(figures: MeasuredCosts, compression: str, hosts: int) -> float:
    compute = figures.compute["pipe"]
    codec, low_rank = _codec(compression)
    exchange = _weights(figures, compression, hosts) + _buffers(figures, hosts)
    if low_rank:
        return max(compute + figures.low_rank, exchange + _second(figures, hosts))
    return max(compute + _stolen(figures, figures.bytes, codec), exchange)


def _local(figures: MeasuredCosts, way: Choice, hosts: int) -> float:
    """Predict the seconds of a step of `local`. PowerSGD averages two factors, and the second one only when the average
    of the weights is applied, so the training waits for the second."""
    compute, every = figures.compute["local"], way.every or figures.sync_every
    codec, low_rank = _codec(way.compression)
    exchange = _weights(figures, way.compression, hosts)
    stolen = _stolen(figures, figures.bytes, codec)
    hidden = 0.0 if way.at_once else (every + 1) // 2 * compute
    round_ = every * compute + max(stolen, exchange - hidden)
    return (round_ + (figures.low_rank + _second(figures, hosts) if low_rank else 0.0)) / every


def _gossip(figures: MeasuredCosts, compression: str, hosts: int) -> float:
    """Predict the seconds C of a step of `gossip`: C = c + x s, where c is the step's compute, x the exchanges per step
    (C / seconds of an exchange, at most 1) and s the processor seconds of one exchange.

    Computing for an exchange takes twice as long if it shares a core with the training.
    """
    compute, link, network = figures.compute["gossip"], figures.link_costs[compression], figures.network
    work = figures.busy * (link.say + link.settle + figures.mail * link.bytes)
    moving = 2 * (network.alpha + link.bytes / network.bandwidth) if hosts > 1 else 2 * figures.mail * link.bytes
    exchange = moving + (1.0 + figures.busy) * (2 * link.say + link.settle)
    slowed = compute + work
    return slowed if slowed >= exchange else compute / (1.0 - work / exchange)


def _codec(compression: str) -> tuple[str, bool]:
    """Return the compression of the data that is sent, and whether `compression` is PowerSGD, whose factors are sent
    uncompressed ("none")."""
    low_rank = compression.startswith("powersgd")
    return ("none" if low_rank else compression), low_rank


def _stolen(figures: MeasuredCosts, size: int, codec: str) -> float:
    """Return the seconds by which an exchange of `size` bytes in the background slows the training's compute."""
    return figures.busy * figures.handling[codec].processor * size


def _halves(bucket: BucketCost) -> tuple[int, int]:
    return (bucket.low_rank.first, bucket.low_rank.second) if bucket.low_rank else (bucket.bytes, 0)


def _weights(figures: MeasuredCosts, compression: str, hosts: int) -> float:
    """Return the seconds to average all gradients, or weights of the same size, one bucket after the other; under
    PowerSGD, only the first of its two factors."""
    codec, low_rank = _codec(compression)
    sizes = [_halves(bucket)[0] if low_rank else bucket.bytes for bucket in figures.buckets]
    return sum(allreduce(figures, size, codec, hosts) for size in sizes)


def _second(figures: MeasuredCosts, hosts: int) -> float:
    """Return the seconds to average the second of PowerSGD's two factors, for all buckets."""
    sizes = [_halves(bucket)[1] for bucket in figures.buckets]
    return sum(allreduce(figures, size, "none", hosts) for size in sizes if size)


def _buffers(figures: MeasuredCosts, hosts: int) -> float:
    return sum(allreduce(figures, size, "none", hosts) for size in figures.buffers)
