"""Measurements of a worker of `dadt bench advise`: the network, exchanges, and the parts of a training step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from dadt.comm import executors
from dadt.comm.bucket import split
from dadt.comm.compression import OF_MOMENTUM, forms
from dadt.comm.compression import LowRank as Form
from dadt.comm.executors import c10d
from dadt.comm.executors.base import Connection
from dadt.comm.executors.keys import Keys
from dadt.comm.executors.meet import Apart
from dadt.comm.keepalive import leak
from dadt.control.machine import cores
from dadt.inject import worker
from dadt.train.exchange.bucket_plan import BucketPlan
from dadt.train.exchange.delivery import hand_out
from dadt.train.exchange.exchange import Exchange
from dadt.train.exchange.step_metadata import StepMetadata
from dadt.train.runtime import Runtime
from dadt_cli.bench import models
from dadt_cli.bench.cost import LinkCost
from dadt_cli.bench.link_cost import link_costs
from dadt_cli.bench.trainer import device_of, optimizer_of

TIMEOUT = 120.0
ROUND_TRIPS = 100
LEAST, MOST = 64 << 10, 16 << 20
"""Bytes of the smallest and the largest message to measure."""
LONG = 1.0
"""If a message takes longer than this many seconds, larger messages are not measured."""
REPEATS = 5
COMPUTE_SECONDS = 3.0
LOW_RANK = "powersgd:4"
OF_GRADIENTS = ("none", "bf16", "int8", "int4")
CODECS = (*OF_GRADIENTS, *OF_MOMENTUM)
MAILS = 3

Times = list[tuple[int, float]]
"""Bytes and seconds of each measured message."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """All measurements that one rank makes for `dadt bench advise`."""

    cross_rank: int
    local_size: int
    cores: int
    threads: int
    executor: str
    alpha: float
    """Seconds that a short message takes one way; 0 on ranks that sent no such message, since only one rank on each of
    two hosts does."""
    pairs: Times
    """Bytes and seconds of messages that two ranks sent each other at the same time; empty on all other ranks."""
    exchanges: dict[str, Times]
    """Bytes and seconds of each averaging over all ranks, by compression."""
    processor: dict[str, float]
    """Processor seconds of this process per byte averaged over all ranks, by compression."""
    packing: float
    """Seconds per byte to average with the null executor, which transfers nothing: the cost of packing."""
    buckets: list[tuple[int, float]]
    """For each bucket of gradients its bytes, and the share of the backward pass after which the bucket is complete."""
    low_rank: list[tuple[int, int]]
    """For each bucket the bytes of PowerSGD's two factors; (0, 0) if PowerSGD leaves the bucket uncompressed."""
    low_rank_seconds: float
    link_costs: dict[str, LinkCost]
    """The costs of a `gossip` exchange at one of its two ends, by compression."""
    mail: float
    """Processor seconds of this process to send a message to another rank and receive one of the same size, divided by
    this size in bytes."""
    buffers: list[int]
    parts: tuple[float, float, float]
    """Seconds of the forward pass, the backward pass and the optimizer's step."""
    busy: float
    """Share of the training time in which the training thread ran or waited for a core; small on a GPU."""
    scarcity: float
    """Seconds in which the training thread ran or waited for a core, divided by the seconds in which it ran: above 1 if
    cores are shared."""
    parameters: int


def probe(
    model: str, batch_size: int, device: str, seconds: float = COMPUTE_SECONDS, optimizer: str = "sgd"
) -> ProbeResult:
    """Measure on this rank what `dadt bench advise` needs; runs on all ranks at once. seconds: duration of the
    training. Raises ConfigError for a model that cannot be trained."""
    runtime = worker.ask()
    if runtime.ranks.control is not None:
        runtime.ranks.control.claim()
    where = device_of(device)
    ranks = _Ranks(runtime)
    step = _Step(model, batch_size, where, runtime.ranks.config.bucket_mb, optimizer)
    parts, ready = step.measure(seconds)
    most = min(MOST, max(LEAST, step.bytes))
    alpha, pairs = ranks.network(most)
    mail = ranks.mail(most)
    exchanges, processor = {}, {}
    for compression in CODECS:
        exchanges[compression], processor[compression] = ranks.exchanges(compression, most, where)
    low_rank_seconds, halves = step.low_rank()
    found = ProbeResult(
        cross_rank=runtime.ranks.world.cross_rank,
        local_size=runtime.ranks.world.local_size,
        cores=cores(),
        threads=torch.get_num_threads(),
        executor=ranks.executor,
        alpha=alpha,
        pairs=pairs,
        exchanges=exchanges,
        processor=processor,
        packing=ranks.packing(most, where),
        buckets=ready,
        low_rank=halves,
        low_rank_seconds=low_rank_seconds,
        link_costs=link_costs([p.data for p in step.trained], (*OF_GRADIENTS, LOW_RANK)),
        mail=mail,
        buffers=step.buffers,
        parts=parts,
        busy=step.busy,
        scarcity=step.scarcity,
        parameters=step.parameters,
    )
    ranks.close()
    return found


class _Over:
    """Adapts a connection to the interface that Exchange expects of a runtime."""

    background = None

    def __init__(self, connection: Connection, ranks: int) -> None:
        self.engine, self.device = connection.engine, connection.device
        self.members: Sequence[int] = range(ranks)

    keep_failed = staticmethod(leak)

    def wait(self, work: Any) -> None:
        work.wait(TIMEOUT)


class _Ranks:
    """Three ways in which this rank is connected with all others: as in training, by the null executor, and by Gloo for
    messages between two ranks."""

    def __init__(self, runtime: Runtime) -> None:
        self._world = world = runtime.ranks.world
        self._config = replace(runtime.ranks.config, timeout=TIMEOUT)
        hosts = [int(blob) for blob in runtime.ranks.meet.exchange("probe: host", str(world.cross_rank).encode())]
        self._peer = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 0)
        """The first rank on another host than rank 0, which measures the network together with rank 0; 0 if there is
        one host."""
        self._numbers = count()
        self._connection: Connection = executors.connect(self._config, world, Apart(runtime.ranks.meet, "probe:"))
        still = replace(self._config, executor="null", broadcast_executor="", allreduce_executor="")
        self._still = executors.connect(still, world, Apart(runtime.ranks.meet, "still:"))
        """A connection by the null executor, which transfers nothing."""
        keys = Keys(runtime.ranks.meet, world.rank, world.world_size)
        self._group = c10d.group("gloo", keys, world, range(world.world_size), TIMEOUT, "pairs")
        self.executor = executors_name(self._config, world, hosts)

    def network(self, most: int) -> tuple[float, Times]:
        """Measure the network between the first ranks of two hosts: latency, and bytes and seconds of messages."""
        alpha, pairs = 0.0, []
        if self._world.rank in (0, self._peer) and self._peer:
            other = self._peer if self._world.rank == 0 else 0
            alpha = self._round_trip(other) / 2
            for size in _sizes(most):
                tries = [(size, self._both_ways(other, size)) for _ in range(REPEATS)]
                pairs += tries[1:]
                if tries[-1][1] > LONG:
                    break
        self._together()
        return alpha, pairs

    def mail(self, size: int) -> float:
        """Return processor seconds per byte of the executor's point-to-point messages, sent both ways at once between
        the two ranks that measure the network, or between ranks 0 and 1 on a single host."""
        peers = (0, self._peer or 1)
        used = 0.0
        if self._world.rank in peers:
            other = peers[self._world.rank == 0]
            mine, theirs = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
            begun = time.process_time()
            for _ in range(MAILS):
                transits = [self._connection.mail.receive(theirs, other), self._connection.mail.send(mine, other)]
                for transit in transits:
                    transit.wait(TIMEOUT)
            used = (time.process_time() - begun) / (MAILS * size)
        self._together()
        return used

    def packing(self, size: int, device: torch.device) -> float:
        """Return the seconds per byte to average without transferring anything: the cost of packing."""
        tries, _ = self._averagings(self._still, "none", [size], device)
        return statistics.median(seconds / size for _, seconds in tries)

    def exchanges(self, compression: str, most: int, device: torch.device) -> tuple[Times, float]:
        """Return bytes and seconds of each averaging of one tensor, and processor seconds per byte."""
        return self._averagings(self._connection, compression, _sizes(most), device)

    def _averagings(
        self, over: Connection, compression: str, sizes: list[int], device: torch.device
    ) -> tuple[Times, float]:
        tries: Times = []
        used = total = 0.0
        for size in sizes:
            parameter = torch.nn.Parameter(torch.randn(size // 4, device=device))
            parameter.grad = torch.randn_like(parameter)
            schema = BucketPlan([parameter], [], 1 << 40, over.device, 2, compression, compression in OF_MOMENTUM)
            for turn in range(REPEATS):
                gradient = parameter.grad.clone()  # a copy, since the bucket's memory is overwritten
                parameter.grad = gradient
                self._together()
                before = time.process_time()
                seconds = self._average(over, schema, device)
                if turn:
                    tries.append((size, seconds))
                    used, total = used + time.process_time() - before, total + size
            if self._slowest(tries[-1][1]) > LONG:
                break
        return tries, used / total

    def close(self) -> None:
        self._together()
        for connection in (self._still, self._connection):
            connection.engine.close(TIMEOUT)
            connection.close()

    def _average(self, over: Connection, schema: BucketPlan, device: torch.device) -> float:
        number = next(self._numbers)
        begun = time.perf_counter()
        exchange = Exchange(_Over(over, self._world.world_size), schema, number, f"probe {number}", 1.0)
        exchange.close(StepMetadata(schema.crc, 0, 0, 0, 0, False, 1.0, 0.0))
        exchange.receive()
        hand_out(schema.parameters, exchange.averaged_gradients(), None)
        _finish(device)
        return time.perf_counter() - begun

    def _round_trip(self, other: int) -> float:
        letter = torch.zeros(2)
        ways = [self._group.send, self._group.recv]
        times = []
        for turn in range(ROUND_TRIPS + 5):
            begun = time.perf_counter()
            for move in ways if self._world.rank == 0 else reversed(ways):
                move([letter], other, 0).wait()
            if turn >= 5:
                times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def _both_ways(self, other: int, size: int) -> float:
        mine, theirs = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        self._swap(torch.zeros(1), torch.zeros(1), other, 2)
        begun = time.perf_counter()
        self._swap(mine, theirs, other, 1)
        return time.perf_counter() - begun

    def _swap(self, mine: torch.Tensor, theirs: torch.Tensor, other: int, tag: int) -> None:
        for work in [self._group.recv([theirs], other, tag), self._group.send([mine], other, tag)]:
            work.wait()

    def _together(self) -> None:
        self._connection.engine.allgather(b"", f"together {next(self._numbers)}").wait(TIMEOUT)

    def _slowest(self, seconds: float) -> float:
        """Return the largest value of all ranks, so that all ranks decide alike whether to continue."""
        work = self._connection.engine.allgather(repr(seconds).encode(), f"seconds {next(self._numbers)}")
        work.wait(TIMEOUT)
        return max(float(lane) for lane in work.lanes)


class _Step:
    """One training step of the model, with each part measured separately."""

    def __init__(self, model: str, batch_size: int, device: torch.device, bucket_mb: float, optimizer: str) -> None:
        workload = models.make(model)
        self._device = device
        self._model = workload.model.to(device)
        self._loss: Callable[..., torch.Tensor] = workload.loss
        self._batch = [part.to(device) for part in workload.batch(batch_size)]
        self.trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = optimizer_of(optimizer, self.trained)
        most = int(bucket_mb * 2**20)
        self._buckets = split(self.trained[::-1], most)
        self.parameters = sum(p.numel() for p in self._model.parameters())
        self.bytes = sum(p.numel() * p.element_size() for p in self.trained)
        floating = [b for b in self._model.buffers() if b.is_floating_point()]
        self.buffers = [_size(bucket.tensors) for bucket in split(floating, most)]
        self.busy = self.scarcity = 1.0
        self._ready: dict[torch.Tensor, float] = {}
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._see)  # type: ignore[no-untyped-call]

    def measure(self, seconds: float) -> tuple[tuple[float, float, float], list[tuple[int, float]]]:
        """Train for `seconds` seconds. Returns the seconds of each part of a step, and for each bucket its bytes and
        the share of the backward pass that completes the bucket."""
        rows: list[tuple[float, float, float]] = []
        shares: list[list[float]] = []
        begun, before = time.perf_counter(), _run_and_waited()
        deadline = begun + seconds
        while len(rows) < 3 or time.perf_counter() < deadline:
            row, share = self._take()
            rows.append(row)
            shares.append(share)
        ran, waited = (now - then for now, then in zip(_run_and_waited(), before, strict=True))
        self.busy = min(1.0, (ran + waited) / (time.perf_counter() - begun))
        self.scarcity = (ran + waited) / ran
        forward, backward, optimizer = (statistics.median(column) for column in zip(*rows[1:], strict=True))
        ready = [statistics.median(column) for column in zip(*shares[1:], strict=True)]
        sizes = [_size(bucket.tensors) for bucket in self._buckets]
        return (forward, backward, optimizer), list(zip(sizes, ready, strict=True))

    def low_rank(self) -> tuple[float, list[tuple[int, int]]]:
        """Return the seconds that PowerSGD computes in a step, and the bytes of each bucket's two factors."""
        made = forms(LOW_RANK, self._buckets)
        halves = [_halves(form) if isinstance(form, Form) else (0, 0) for form in made]
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            for bucket, form in zip(self._buckets, made, strict=True):
                if isinstance(form, Form):
                    round_ = form.begin([t.grad for t in bucket.tensors], None, 0)
                    round_.halfway()
                    round_.finish()
                    round_.learn()
            _finish(self._device)
            times.append(time.perf_counter() - begun)
        return min(times), halves

    def _take(self) -> tuple[tuple[float, float, float], list[float]]:
        self._optimizer.zero_grad()
        begun = time.perf_counter()
        loss = self._loss(self._model, *self._batch)
        _finish(self._device)
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        _finish(self._device)
        backward = time.perf_counter()
        self._optimizer.step()
        _finish(self._device)
        ended = time.perf_counter()
        length = backward - forward
        ready = [max(self._ready[t] for t in bucket.tensors) for bucket in self._buckets]
        shares = [(at - forward) / length for at in ready]
        return (forward - begun, length, ended - backward), shares

    def _see(self, parameter: torch.Tensor) -> None:
        self._ready[parameter] = time.perf_counter()


def executors_name(config: Any, world: Any, hosts: list[int]) -> str:
    """Return the name of the executor to show: for `auto`, the one that is chosen for these hosts."""
    if config.executor != "auto":
        return str(config.executor)
    from dadt.config.executor import HostWorkers, pick

    gpus = torch.cuda.device_count()
    return pick([HostWorkers("", hosts.count(host), gpus) for host in sorted(set(hosts))])[0]


def _sizes(most: int) -> list[int]:
    return [max(LEAST, most // 16), max(LEAST, most // 4), most]


def _size(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _halves(form: Form) -> tuple[int, int]:
    first, second = form.first.layout, form.second.layout
    return first.total * first.dtype.itemsize, second.total * second.dtype.itemsize


def _run_and_waited() -> tuple[float, float]:
    """Return the seconds that the main thread of this process has run, and has waited for a core."""
    try:
        ran, waited, _ = Path("/proc/self/schedstat").read_text().split()
    except OSError:
        return time.thread_time(), 0.0  # kernels without schedstat do not count the time that a thread waits
    return 1e-9 * int(ran), 1e-9 * int(waited)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
