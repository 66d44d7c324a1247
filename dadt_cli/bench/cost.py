"""How long a training step takes under each algorithm: the alpha-beta model of communication, on what was measured.

A message of M bytes between two hosts takes alpha + M / B: alpha is the latency, B the bandwidth of a host's link in
each direction (Hockney 1994). Of h hosts, with a byte's handling g and an operation's o on each:

    allreduce, ring (Patarasuk and Yuan 2009)    T(M) = o + 2 (h - 1) alpha + 2 (h - 1) / h  M / B + g M
    compressed: alltoall, then allgather         T(M) = o + h alpha + 2 (h - 1) / h  w M / B + g' M
                                                 w: bf16, fp16 1/2; int8 (256 + 4) / 1024 (comm/executors/compressed.py)
    up to 32 KiB: everybody gets everything      T(M) = o + (h - 1) alpha + (h - 1) M / B + g M
    hierarchical: the same with hosts as ranks, as a host's workers share its link; alpha counts for each 4 MiB

PowerSGD of rank r sends r n values of each n x m matrix, then r m; what is no matrix goes with the first, uncompressed.

With C the step's compute (forward F, then backward), X the sum of T over buckets:

    sync     buckets go as backward completes them, one after the other; the last one at its end, and is waited for
    pipe     max(C, X) (arXiv:1811.03619); with PowerSGD X has both halves, and C what it computes
    local    (H/2 C + max(H/2 C, X)) / H: an average has half a round to come
    gossip   C: nobody waits. An exchange takes 2 (alpha + m / B) + 2 s + t, as question and answer of m bytes go one
             after the other, each after s of computing, and t is computed at the end; there is one a step at most

While computing holds all cores of a worker, the processor time of what goes on behind it is added to C. C is that of
each algorithm by itself, measured where no byte moves, without packing, which is part of T. What the model leaves out:
ranks of unequal speed, and switches that carry less than all links together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SMALL = 32 * 1024
"""Bytes up to which an allreduce is an allgather (dadt/comm/executors/pull.py)."""
WIRE = {"none": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": (256 + 4) / 1024}
"""Bytes that travel for a byte of float32."""
CHUNK = 4 << 20
"""Bytes of a chunk, in which the hierarchical executor exchanges the data of an allreduce."""
ALGORITHMS = ("sync", "pipe", "local", "gossip")
"""The algorithms, from the one that changes a training least; see docs/algorithms.md."""
COMPRESSIONS = ("none", "bf16", "int8", "powersgd:4")
HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CLOSE = 0.95
"""Among settings with at least this share of the fastest's rate, the one that changes training least is chosen."""


@dataclass(frozen=True, slots=True)
class NetworkSpeed:
    """The network between hosts, as measured."""

    alpha: float
    """Seconds of the shortest message, one way."""
    bandwidth: float
    """Bytes per second of a host's link, in each direction at once."""


@dataclass(frozen=True, slots=True)
class Handling:
    """The costs of one way to compress, beside the network."""

    each: float
    """o: seconds of an operation."""
    per_byte: float
    """g: seconds for each byte of the gradients."""
    processor: float
    """Seconds that a core is taken for each byte of the gradients."""


@dataclass(frozen=True, slots=True)
class LowRankBytes:
    """PowerSGD's two halves of one bucket, in bytes."""

    first: int
    second: int


@dataclass(frozen=True, slots=True)
class LinkCost:
    """One end of an exchange of gossip, whichever way it compresses."""

    bytes: float
    """Bytes of one message."""
    say: float
    """Processor seconds before a message is sent."""
    settle: float
    """Processor seconds after the other end's message has come."""


@dataclass(frozen=True, slots=True)
class BucketCost:
    """Gradients that are exchanged together."""

    bytes: int
    ready: float
    """Share of the backward after which they are complete."""
    low_rank: LowRankBytes | None = None


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What was measured of a model and of the machines that train it: all from which the time of a step is computed."""

    network: NetworkSpeed
    handling: Mapping[str, Handling]
    """The costs of exchanges beside the network, by compression, without powersgd."""
    buckets: Sequence[BucketCost]
    """The buckets in the order in which they are exchanged."""
    buffers: Sequence[int]
    """Bytes of each exchange of BatchNorm's statistics."""
    forward: float
    """Share of a step's compute before the backward."""
    backward: float
    compute: Mapping[str, float]
    """Seconds of a step by algorithm, where no byte moves, without the packing of gradients."""
    packing: float
    """Seconds of packing gradients for each byte."""
    low_rank: float
    """Seconds that PowerSGD computes in a step."""
    link_costs: Mapping[str, LinkCost]
    """The costs of one end of an exchange of gossip, by compression."""
    mail: float
    """Seconds that a core is taken for each byte that goes to one other worker, and each that comes."""
    busy: float
    """Share of a step in which computing holds all cores of a worker; 0 where it leaves one for communication."""
    chunked: bool
    """Whether the executor is hierarchical."""
    sync_every: int

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class Combination:
    algorithm: str
    compression: str

    @property
    def options(self) -> list[str]:
        """Options of `dadt run`."""
        return ["--algorithm", self.algorithm, "--compression", self.compression]

    def __str__(self) -> str:
        return self.algorithm if self.compression == "none" else f"{self.algorithm} {self.compression}"


WAYS = tuple(Combination(algorithm, compression) for algorithm in ALGORITHMS for compression in COMPRESSIONS)


def allreduce(figures: MeasuredCosts, size: int, compression: str, hosts: int) -> float:
    """Seconds of one allreduce of `size` bytes of float32."""
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


def seconds(figures: MeasuredCosts, way: Combination, hosts: int) -> float:
    """Seconds of one training step, as the model predicts them for this way and number of hosts."""
    if way.algorithm == "sync":
        return _sync(figures, way.compression, hosts)
    if way.algorithm == "pipe":
        return _pipe(figures, way.compression, hosts)
    if way.algorithm == "local":
        return _local(figures, way.compression, hosts)
    return _gossip(figures, way.compression, hosts)


def rates(figures: MeasuredCosts, hosts: Sequence[int]) -> dict[Combination, list[float]]:
    """Steps per second of each way, for these numbers of hosts."""
    return {way: [1.0 / seconds(figures, way, count) for count in hosts] for way in WAYS}


def best(found: Mapping[Combination, float]) -> Combination:
    """The setting that changes the training least, of those nearly as fast as the fastest."""
    enough = CLOSE * max(found.values())
    return next(way for way in WAYS if found.get(way, 0.0) >= enough)


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
    exchange = _exchange(figures, compression, hosts)
    if low_rank:
        return max(compute + figures.low_rank, exchange + _second(figures, hosts))
    return max(compute + _stolen(figures, figures.bytes, codec), exchange)


def _local(figures: MeasuredCosts, compression: str, hosts: int) -> float:
    """The second half of PowerSGD begins where the mean is merged, and is waited for."""
    compute, every = figures.compute["local"], figures.sync_every
    codec, low_rank = _codec(compression)
    exchange = _weights(figures, compression, hosts)
    stolen = _stolen(figures, figures.bytes, codec)
    hidden = (every + 1) // 2 * compute
    round_ = every * compute + max(stolen, exchange - hidden)
    return (round_ + (figures.low_rank + _second(figures, hosts) if low_rank else 0.0)) / every


def _gossip(figures: MeasuredCosts, compression: str, hosts: int) -> float:
    """x exchanges a step, of which each takes s of the processor's time: C = c + x s, and x is C / exchange or 1.

    What is computed for an exchange takes twice as long where it shares a core with the training.
    """
    compute, link, network = figures.compute["gossip"], figures.link_costs[compression], figures.network
    work = figures.busy * (link.say + link.settle + figures.mail * link.bytes)
    moving = 2 * (network.alpha + link.bytes / network.bandwidth) if hosts > 1 else 2 * figures.mail * link.bytes
    exchange = moving + (1.0 + figures.busy) * (2 * link.say + link.settle)
    slowed = compute + work
    return slowed if slowed >= exchange else compute / (1.0 - work / exchange)


def _codec(compression: str) -> tuple[str, bool]:
    """The compression of what travels ("none" under PowerSGD, whose factors are sent as they are), and whether it is
    PowerSGD."""
    low_rank = compression.startswith("powersgd")
    return ("none" if low_rank else compression), low_rank


def _stolen(figures: MeasuredCosts, size: int, codec: str) -> float:
    """Seconds that an exchange of `size` bytes takes from the compute beside which it goes on."""
    return figures.busy * figures.handling[codec].processor * size


def _halves(bucket: BucketCost) -> tuple[int, int]:
    return (bucket.low_rank.first, bucket.low_rank.second) if bucket.low_rank else (bucket.bytes, 0)


def _weights(figures: MeasuredCosts, compression: str, hosts: int) -> float:
    """Seconds to average all gradients, or weights of the same size, at once; under PowerSGD its first half."""
    codec, low_rank = _codec(compression)
    sizes = [_halves(bucket)[0] if low_rank else bucket.bytes for bucket in figures.buckets]
    return sum(allreduce(figures, size, codec, hosts) for size in sizes)


def _exchange(figures: MeasuredCosts, compression: str, hosts: int) -> float:
    return _weights(figures, compression, hosts) + _buffers(figures, hosts)


def _second(figures: MeasuredCosts, hosts: int) -> float:
    """Seconds to average the second half of PowerSGD for all buckets."""
    sizes = [_halves(bucket)[1] for bucket in figures.buckets]
    return sum(allreduce(figures, size, "none", hosts) for size in sizes if size)


def _buffers(figures: MeasuredCosts, hosts: int) -> float:
    return sum(allreduce(figures, size, "none", hosts) for size in figures.buffers)
