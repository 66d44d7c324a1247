"""Hierarchical executor: shared memory within each host, another executor between hosts, so that each byte crosses the
network once.

An allreduce runs in chunks. The ranks of a host reduce a chunk, each obtaining one shard; the ranks that own the same
shard reduce it across hosts, all shards in parallel; then each host's ranks gather the shards. While one chunk crosses
the network, the thread of the host's C++ engine reduces the next chunk and gathers the previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, groupby, pairwise
from operator import itemgetter
from typing import Any

import torch

from dadt import _core
from dadt.comm.bucket import DTYPES
from dadt.comm.executors import c10d, compressed, mpi, pull, tcp
from dadt.comm.executors.base import Connection, Executor, Measured, P2PWork, renumbered
from dadt.comm.executors.core import SHARES
from dadt.comm.executors.meet import Meet, OneOf, attend
from dadt.comm.link_totals import LinkTotals, together
from dadt.config import Config
from dadt.errors import CommError
from dadt.world import World

CHUNK_BYTES = 4 << 20
"""Bytes of a chunk: large enough that sending it takes much longer than a round trip between hosts, and small enough
that reducing the first chunk and gathering the last one, which overlap with no transfer, cost little."""


def connect(cross: str, config: Config, world: World, meet: Meet) -> Connection:
    """Connect all ranks by a hierarchical executor. cross: the executor between hosts: tcp, gloo, nccl, mpi or
    c10d:<name>. Raises ConfigError if it cannot be used."""
    places = meet.exchange("place", f"{world.cross_rank} {world.local_rank}".encode())
    told = sorted((*map(int, place.split()), rank) for rank, place in enumerate(places))
    hosts = [[rank for *_, rank in ranks] for _, ranks in groupby(told, key=itemgetter(0))]
    join = _joiner(cross or "tcp", config, world, meet)
    executor = Hierarchical(hosts, world.rank, _local(hosts, config, world, meet), join, config.timeout)
    return replace(pull.connect(executor, world.rank, world.world_size, config.timeout), links=executor.links)


def _joiner(cross: str, config: Config, world: World, meet: Meet) -> Callable[[Sequence[int]], Executor]:
    """Return a function that connects this rank with the given ranks by the executor between hosts."""
    if cross == "mpi":
        return mpi.joiner(config, world, meet)
    numbers = count()  # both groups of a rank may have the same ranks, so the names are numbered
    name = cross.removeprefix("c10d:")
    join: Callable[[Meet, World, Sequence[int], Config], Executor] = tcp.join
    if cross != "tcp":
        c10d.check(name)
        join = partial(c10d.join, name)
    return lambda ranks: join(OneOf(meet, f"group {next(numbers)}"), world, ranks, config)


def _local(hosts: Sequence[Sequence[int]], config: Config, world: World, meet: Meet) -> _core.Engine | None:
    """Return a C++ engine over shared memory among the ranks of this host; None if this rank is alone on its host."""
    here = next(ranks for ranks in hosts if world.rank in ranks)
    executor = _core.ShmExecutor(here.index(world.rank), len(here))
    endpoints = meet.exchange("shm endpoint", executor.endpoint())
    if len(here) == 1:
        return None
    attend(meet, SHARES, partial(executor.connect, [endpoints[rank] for rank in here], config.start_timeout))
    return _core.Engine(executor, here.index(world.rank), len(here), config.timeout)


class Hierarchical:
    """Executor that reduces within each host first, then across hosts. A chunk has as many shards as the host with the
    fewest ranks has ranks; some ranks of larger hosts own no shard."""

    name = "hierarchical"

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        rank: int,
        local: _core.Engine | None,
        join: Callable[[Sequence[int]], Executor],
        timeout: float,
    ) -> None:
        """hosts: for each host, its ranks in order of local rank. join: connects this rank with the ranks of a list
        that includes it."""
        self._hosts = hosts
        self._host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
        self._here = hosts[self._host]
        self._me = self._here.index(rank)
        self._shards = min(map(len, hosts))
        self._local = local
        self._timeout = timeout
        self._flat = join(range(sum(map(len, hosts))))
        self._across = [ranks[self._me] for ranks in hosts] if self._me < self._shards else []
        """The ranks that own the same shard of each chunk as this rank, one per host; empty if this rank owns none."""
        self._cross = join(self._across) if len(self._across) > 1 else None

    # Averages within and between hosts --------------------------------------------------------------------------------

    def allreduce(self, flat: torch.Tensor, reduction: str) -> None:
        def cross(shard: torch.Tensor) -> None:
            with self._naming():
                assert self._cross is not None
                self._cross.allreduce(shard, reduction)

        self._allreduce(flat, reduction, cross)

    def allreduce_compressed(self, flat: torch.Tensor, codec: _core.Codec, owed: int, keep: float) -> tuple[int, int]:
        """Sum the tensor, compressed between hosts only, since bytes within a host cost little. Returns the bytes sent
        to other hosts, and those that would have been sent uncompressed."""
        hosts = len(self._hosts)
        sent = plain = 0

        def cross(shard: torch.Tensor) -> None:
            nonlocal sent, plain
            place = (shard.data_ptr() - flat.data_ptr()) // flat.element_size()
            mine = owed + place * torch.float32.itemsize if owed else 0
            values = shard.to(torch.float32)
            with self._naming():
                assert self._cross is not None
                compressed.allreduce(self._cross, self._host, hosts, values, codec, mine, keep)
            if values is not shard:
                shard.copy_(values)
            sent += 2 * (hosts - 1) * compressed.Parts(codec, shard.numel(), hosts).bytes
            plain += 2 * (hosts - 1) * shard.nbytes // hosts

        self._allreduce(flat, "sum", cross)
        return sent, plain

    def _allreduce(self, flat: torch.Tensor, reduction: str, cross: Callable[[torch.Tensor], None]) -> None:
        """Reduce the tensor in place, chunk by chunk. cross: reduces this rank's shard across hosts."""
        gathers = []
        with self._failing():
            chunks = list(_chunks(flat, self._shards))
            reducing = self._reduce(chunks[0], reduction) if chunks else None
            for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
                reduced = reducing
                reducing = None if following is None else self._reduce(following, reduction)
                self._wait(reduced)
                if self._cross is not None and chunk[self._me].numel():
                    cross(chunk[self._me])
                gathers.append(self._gather(chunk))
            for gather in gathers:
                self._wait(gather)

    def _reduce(self, shards: Sequence[torch.Tensor], reduction: str) -> _core.Work | None:
        """Start to reduce the shards over this host's ranks. Each rank receives the result of its own shard in
        place."""
        if self._local is None:
            return None
        layout = _core.Layout(DTYPES[shards[0].dtype], [shard.numel() for shard in shards])
        inputs = [shard.data_ptr() for shard in shards]
        outputs = [address if shard == self._me else 0 for shard, address in enumerate(inputs)]
        kind = getattr(_core.Reduction, reduction)
        return self._local.allreduce(layout, inputs, outputs, "reduce-scatter", reduction=kind)

    def _gather(self, shards: Sequence[torch.Tensor]) -> _core.Work | None:
        """Start an all-gather within this host, so that each rank gets every shard from the rank that owns it."""
        if self._local is None:
            return None
        pieces = [(shard.data_ptr(), shard.nbytes) for shard in shards]
        pieces += [(0, 0)] * (len(self._here) - self._shards)
        return self._local.exchange([pieces[self._me]] * len(self._here), pieces, "allgather")

    # Broadcasts, gathers and exchanges without arithmetic -------------------------------------------------------------

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Broadcast the tensor in overlapping chunks: first to one rank of each host, then from there to the host's
        other ranks."""
        source = next(number for number, ranks in enumerate(self._hosts) if root in ranks)
        at = self._hosts[source].index(root)
        leader = at if at < self._shards else 0
        first = at if source == self._host else leader
        works = []
        with self._failing():
            for (chunk,) in _chunks(flat, 1):
                if source == self._host:
                    works.append(self._spread(chunk, first))
                    if self._me == leader != at:
                        self._wait(works[-1])
                if self._me == leader and self._cross is not None:
                    with self._naming():
                        self._cross.broadcast(chunk, source)
                if source != self._host:
                    works.append(self._spread(chunk, first))
            for work in works:
                self._wait(work)

    def _spread(self, chunk: torch.Tensor, first: int) -> _core.Work | None:
        if self._local is None:
            return None
        layout = _core.Layout(_core.DType.uint8, [chunk.nbytes])
        return self._local.broadcast(layout, [chunk.data_ptr()], first, "broadcast")

    def allgather(self, mine: torch.Tensor, all: torch.Tensor) -> None:
        with self._failing():
            self._flat.allgather(mine, all)

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        with self._failing():
            self._flat.exchange(sends, receives)

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> P2PWork:
        return self._flat.send(tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> P2PWork:
        return self._flat.receive(tensor, peer, tag)

    def links(self) -> Mapping[int, LinkTotals]:
        first = {rank: ranks[0] for ranks in self._hosts for rank in ranks}
        executors: list[object] = [self._cross, self._flat]
        links = [each.links() for each in executors if isinstance(each, Measured)]
        return together((first[rank], totals) for group in links for rank, totals in group.items())

    # Failure and end of operations ------------------------------------------------------------------------------------

    def _wait(self, work: _core.Work | None) -> None:
        """Wait for an operation of the host's C++ engine, which counts the host's ranks from 0. Raises its errors with
        global rank numbers."""
        if work is None:
            return
        try:
            work.wait(2 * self._timeout)  # twice, because the operation itself fails after the timeout
        except CommError as error:
            named = renumbered(str(error), self._here)
            raise type(error)(f"inside the host of ranks {_list(self._here)}: {named}") from error

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CommError(f"between hosts, among ranks {_list(self._across)}: {error}") from error

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Context manager that aborts all executors if its body fails, so that the host's other ranks do not wait."""
        try:
            yield
        except Exception as error:
            self._end(f"{error}")
            raise

    def _end(self, reason: str) -> None:
        if self._local is not None:
            self._local.abort(reason)
        if self._cross is not None:
            self._cross.abort()
        self._flat.abort()

    def abort(self) -> None:
        self._end(f"rank {self._here[self._me]} has given up")

    def close(self) -> bool:
        if self._local is not None:
            self._local.close(5.0)
        ended = [each.close() for each in (self._cross, self._flat) if each is not None]
        return all(ended)


def _chunks(flat: torch.Tensor, shards: int) -> Iterator[list[torch.Tensor]]:
    """Yield the tensor's chunks in order, each as a list of `shards` shards, some of which may be empty."""
    most = max(1, CHUNK_BYTES // flat.element_size())
    for chunk in torch.split(flat, most) if flat.numel() else ():
        cuts = [len(chunk) * shard // shards for shard in range(shards + 1)]
        yield [chunk[begin:end] for begin, end in pairwise(cuts)]


def _list(ranks: Sequence[Any]) -> str:
    return ", ".join(map(str, ranks))
