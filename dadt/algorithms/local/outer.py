"""State that is equal on all ranks of `local`: the anchors (weights that the ranks agree on), the outer optimizer that
moves them, and the division of a model into fragments."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from dadt._core import Work
from dadt.comm.bucket import Bucket, split
from dadt.comm.compression import LowRank, forms
from dadt.comm.executors.device import Averaging
from dadt.comm.shards import local
from dadt.errors import CommError, Mismatch
from dadt.train.exchange.bucket_exchange import BucketExchange, RankLink

_OWN, _MEAN = 0, 1
"""Indices of a bucket's two buffers: one for the values that this rank sends, one for the received mean."""
_LANE = struct.Struct("<IIIIIId")


class Told(NamedTuple):
    """Numbers about an exchange, which each rank sends to the other ranks together with its values."""

    layout: int
    """crc32 of the shapes and dtypes of the fragment's anchors (the weights that all ranks agree on)."""
    number: int
    """Number of exchanges of this fragment so far; sent modulo 2**32."""
    settles: int
    """1 if the exchange averages weights, 0 if it averages a round's progress."""
    groups: int
    """crc32 of the optimizer's param_group values."""
    overlap: int
    """Number of steps that the previous exchange took on this rank."""
    every: int
    """Number of steps that this rank proposes for the round that now begins."""
    growth: float = 1.0
    """Ratio of the learning rates of the round that ends, summed over its steps, to those of the round before."""


class Outer:
    """The outer optimizer: SGD with Nesterov momentum on the progress of a round, computed like torch.optim.SGD
    (arXiv:2311.08105). The velocity grows and falls with the learning rate, as if progress were divided by it and each
    outer step multiplied by it (SlowMo, arXiv:1910.00643). growth: ratio of the learning rates of a round, summed over
    its steps, to those of the round before."""

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr = lr
        self.momentum = momentum

    def velocity(self, before: torch.Tensor | None, progress: torch.Tensor, growth: float) -> torch.Tensor | None:
        return None if before is None else before.mul(self.momentum * growth).add_(progress)

    def moved(
        self, anchor: torch.Tensor, velocity: torch.Tensor | None, progress: torch.Tensor, growth: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return anchor and velocity after one step of the outer optimizer. velocity: None without momentum."""
        after = self.velocity(velocity, progress, growth)
        step = progress if after is None else progress.add(after, alpha=self.momentum)
        return anchor.add(step, alpha=self.lr), after


class OuterRow(NamedTuple):
    """One parameter, its anchor and its outer velocity (None without momentum). For 16-bit parameters the anchor and
    the exchanged progress have 32 bits: otherwise rounding would hide a round's progress."""

    parameter: torch.Tensor
    part: torch.Tensor
    """The part of the parameter that this rank stores: all of it, unless the script shards the parameter."""
    anchor: torch.Tensor
    velocity: torch.Tensor | None


class Fragment(BucketExchange):
    """Parameters that are exchanged together: `send` starts an exchange; `receive` and `merge` finish it some steps
    later.

    During the exchange the rank trains on, starting where its own progress alone would move the anchor (the weights
    that the ranks agree on). The steps that the rank takes meanwhile are added to the anchor that all ranks have moved
    together.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        outer: Outer,
        peers: RankLink,
        regroup: Callable[[CommError], None],
        bucket_bytes: int,
        compression: str = "none",
    ) -> None:
        """Begin a round at the parameters' values, which are equal on all ranks.

        regroup: function that is called with the error after ranks were lost, and connects the remaining ranks. Before
        it returns, it calls `repeat` or `take` on this object if an exchange was under way. compression: how
        progress is compressed.
        """
        super().__init__(peers, name)
        self.outer = outer
        self._regroup = regroup
        self.sent = Told(0, 0, 0, 0, 0, 0)
        """The numbers that this rank sent in its newest exchange."""
        self.since = 0
        """Number of steps since the last exchange began."""
        self.every = self.next_every = 1
        """Number of steps of the current round, equal on all ranks; and the number that this rank proposes for the next
        one."""
        self.overlap = self.took = 0
        """Number of steps that the next exchange may run in the background, equal on all ranks; and number of steps
        that the last exchange took on this rank."""
        self.rate = self.rate_before = 0.0
        """The learning rate, summed over the steps of the current round and of the round before; 0.0 without outer
        momentum, or if it is not known."""
        self.growth = 1.0
        """`Told.growth` of the first rank in the newest exchange, which all ranks use when they merge its mean."""
        self.over = 0
        """Number of exchanges of this fragment that have ended on this rank."""
        self.absorbed = False
        """Whether the last finished exchange changed only the velocity, because the weights themselves were averaged
        right after it."""
        self.differ = False
        """Whether the ranks' param_group values differed in the last finished exchange."""
        self.replaced = False
        """Whether the script has replaced the weights since the last exchange; the next exchange then averages the
        weights themselves."""
        with torch.no_grad():
            rows = [
                OuterRow(p, part, a := _wide(part), torch.zeros_like(a) if outer.momentum else None)
                for p, part in zip(parameters, map(local, parameters), strict=True)
            ]
        self._buckets = split(
            [r.anchor for r in rows], bucket_bytes, None if peers.device is None else peers.device.device
        )
        self._forms = forms(compression, self._buckets)
        by_anchor = {id(r.anchor): r for r in rows}
        self._rows = [[by_anchor[id(a)] for a in bucket.tensors] for bucket in self._buckets]
        self.rows = {id(r.parameter): r for r in rows}
        self._layout = zlib.crc32(repr([(tuple(r.anchor.shape), str(r.anchor.dtype)) for r in rows]).encode())

    @property
    def size(self) -> int:
        """Number of bytes of the values that one exchange averages, before compression."""
        return sum(a.numel() * a.element_size() for bucket in self._buckets for a in bucket.tensors)

    @property
    def under_way(self) -> bool:
        """Whether an exchange was sent whose mean is not merged yet."""
        return self.sent.number > self.over

    def tensors_of(self, work: Work | Averaging) -> list[torch.Tensor]:
        """Return the parameters that the operation `work` exchanges; empty if the operation does not belong to this
        fragment."""
        index = next((i for i, mine in enumerate(self._works) if mine is work), None)
        return [] if index is None else [r.parameter for r in self._rows[index]]

    # One exchange of a fragment --------------------------------------------------------------------------------

    def receive(self) -> None:
        """Wait for the exchange in flight, and check that all ranks sent matching numbers. Raises Mismatch."""
        while True:
            try:
                self._await()
                self._go_on()
                break
            except CommError as error:
                self._regroup(error)
        self._let_go()
        if not self._works:
            return
        told = [Told(*_LANE.unpack(lane[-_LANE.size :])) for lane in self._works[-1].lanes]
        for rank, theirs in enumerate(told):
            if theirs[:3] != told[0][:3]:
                cause = "the ranks do not run the same steps"
                if theirs.settles != told[0].settles:
                    cause = "load_state_dict() was not called on all of them"
                raise Mismatch(f"{self._works[-1].name}: rank 0 {_told(told[0])}, rank {rank} {_told(theirs)}: {cause}")
        self.differ = len({each.groups for each in told}) > 1
        self.overlap = max(each.overlap for each in told)
        self.every = max(each.every for each in told)
        self.growth = told[0].growth

    def merge(self) -> None:
        """Move the anchor by the mean of the ranks' progress; call after `receive`. Does nothing if the merged anchor
        was already received from another rank, after a loss of ranks."""
        if not self._works:
            return
        with torch.no_grad():
            for bucket, i, row in self._places():
                unsent = row.part.data.to(row.anchor) - self._start(bucket, i, row)
                anchor, velocity = self.outer.moved(row.anchor, row.velocity, bucket.deliver(i, _MEAN), self.growth)
                row.anchor.copy_(anchor)
                if row.velocity is not None and velocity is not None:
                    row.velocity.copy_(velocity)
                row.part.data.copy_(unsent.add_(row.anchor))
        self._end()

    def _end(self, *, absorbed: bool = False) -> None:
        self._works, self._second_works, self._rounds = [], [], []
        self.over, self.absorbed = self.sent.number, absorbed

    def send(self, groups: int) -> None:
        """Start sending this rank's progress from the anchor, without waiting for other ranks. Call after `merge`."""
        growth = self.rate / self.rate_before if self.rate_before > 0 else 1.0
        self.rate_before, self.rate = self.rate, 0.0
        with torch.no_grad():
            for bucket, i, row in self._places():
                progress = row.part.data.to(row.anchor) - row.anchor
                bucket.views[_OWN][i].copy_(progress, non_blocking=True)
                ahead, _ = self.outer.moved(row.anchor, row.velocity, progress, growth)
                row.part.data.copy_(ahead)
        self._send(groups, settles=False, growth=growth)

    def settle(self, groups: int) -> None:
        """Set the weights to their mean over all ranks immediately, and begin a round there. Progress that low-rank
        compression has not sent yet is added to the weights, as no later exchange would send it. (With 8-bit or 16-bit
        compression, unsent progress is only about a thousandth.)
        """
        self.receive()
        if self._works and not self.replaced and any(isinstance(form, LowRank) for form in self._forms):
            self.merge()  # low-rank compression stores the progress that this merge leaves out
        absorbs = bool(self._works)
        with torch.no_grad():
            for bucket, rows, form in zip(self._buckets, self._rows, self._forms, strict=True):
                for i, row in enumerate(rows):
                    if row.velocity is not None and self.replaced:
                        row.velocity.zero_()
                    elif row.velocity is not None and self._works:
                        row.velocity.mul_(self.outer.momentum * self.growth).add_(bucket.deliver(i, _MEAN))
                    own = row.part.data
                    owed = form.owes(i) if isinstance(form, LowRank) and not self.replaced else None
                    if owed is not None:
                        own = own.to(row.anchor).add(owed, alpha=self.outer.lr * (1 + self.outer.momentum))
                    bucket.views[_OWN][i].copy_(own, non_blocking=True)
        if absorbs:
            self._end(absorbed=True)
        self._send(groups, settles=True)
        self.receive()
        if self._works:
            with torch.no_grad():
                for bucket, i, row in self._places():
                    row.anchor.copy_(bucket.deliver(i, _MEAN))
                    row.part.data.copy_(row.anchor)
            self._end()
        self.replaced = False
        self.rate = 0.0
        self.forget_residuals()

    # Recovery after ranks were lost ----------------------------------------------------------------------------

    def forget_residuals(self) -> None:
        for form in self._forms:
            if form is not None:
                form.forget()

    def state(self) -> list[torch.Tensor]:
        """Return anchors and velocities, which are equal on all ranks that have finished equally many exchanges."""
        return [t for _, _, row in self._places() for t in (row.anchor, row.velocity) if t is not None]

    def take(self, state: Sequence[torch.Tensor], *, absorbed: bool, differ: bool, overlap: int, every: int) -> None:
        """Finish the exchange under way with the `state` of a rank that has finished it. absorbed, differ, overlap,
        every: the attributes of these names on this other rank."""
        values = iter(state)
        with torch.no_grad():
            for bucket, i, row in self._places():
                unsent = row.part.data.to(row.anchor) - self._start(bucket, i, row)
                row.anchor.copy_(next(values))
                if row.velocity is not None:
                    row.velocity.copy_(next(values))
                if self.sent.settles:
                    row.part.data.copy_(row.anchor)
                elif not (absorbed or self.replaced):
                    row.part.data.copy_(unsent.add_(row.anchor))
        self._end(absorbed=absorbed)
        self.differ, self.overlap, self.every = differ, overlap, every

    def repeat(self) -> None:
        """Send the exchange under way once more, over the connection of a new group of ranks."""
        self._works, self._second_works, self._rounds = [], [], []
        self._submitted.clear()
        self._launch_all()

    def resumed(self) -> Iterator[tuple[OuterRow, torch.Tensor, torch.Tensor | None]]:
        """Yield each parameter with its anchor and velocity, as if all ranks had sent this rank's progress in the
        exchange in flight."""
        for bucket, i, row in self._places():
            anchor, velocity = self._start(bucket, i, row), row.velocity
            if self.replaced:
                anchor, velocity = _wide(row.part), None if velocity is None else torch.zeros_like(velocity)
            elif self._works:
                velocity = self.outer.velocity(velocity, bucket.deliver(i, _OWN), self.sent.growth)
            yield row, anchor, velocity

    def observe(self) -> dict[str, Any]:
        """Return this rank's own state for a snapshot, while no exchange is under way: its position in the round, and
        what compression has lost so far. The tensors are no copies and stay in use."""
        return {
            "round": [self.since, self.every, self.next_every, self.overlap, self.took],
            "rates": [self.rate, self.rate_before],
            "owes": [None if form is None else form.observe() for form in self._forms],
        }

    def restore(self, own: Mapping[str, Any]) -> None:
        """Continue bit for bit from a snapshot. own: the value that `observe` returned."""
        self.since, self.every, self.next_every, self.overlap, self.took = own["round"]
        self.rate, self.rate_before = own["rates"]
        for form, owed in zip(self._forms, own["owes"], strict=True):
            if form is not None and owed is not None:
                form.restore(owed)

    def progress(self) -> Iterator[tuple[OuterRow, torch.Tensor, torch.Tensor]]:
        """Yield each row with this rank's progress and the mean progress of the exchange that was received."""
        for bucket, i, row in self._places() if self._works else ():
            yield row, bucket.deliver(i, _OWN), bucket.deliver(i, _MEAN)

    def _places(self) -> Iterator[tuple[Bucket, int, OuterRow]]:
        """Yield, for each parameter, its bucket, its index in the bucket, and its row."""
        for bucket, rows in zip(self._buckets, self._rows, strict=True):
            for i, row in enumerate(rows):
                yield bucket, i, row

    def _start(self, bucket: Bucket, index: int, row: OuterRow) -> torch.Tensor:
        """Return the weights at which this rank's round began. The weights are computed again, bitwise equal, to save
        memory."""
        if not self._works:
            return row.anchor
        start, _ = self.outer.moved(row.anchor, row.velocity, bucket.deliver(index, _OWN), self.sent.growth)
        return start.to(row.part.dtype).to(start.dtype)

    def _send(self, groups: int, *, settles: bool, growth: float = 1.0) -> None:
        self.sent = Told(self._layout, self.sent.number + 1, settles, groups, self.took, self.next_every, growth)
        self.began = perf_counter()
        self._works, self._second_works = [], []
        self._launch_all()

    def _launch_all(self) -> None:
        told = _LANE.pack(*self.sent._replace(number=self.sent.number % 2**32))
        last = len(self._buckets) - 1
        for index in range(last + 1):
            self._launch(index, told if index == last else b"", settles=bool(self.sent.settles))

    def _launch(self, index: int, lane: bytes, *, settles: bool) -> None:
        bucket, form = self._buckets[index], None if settles else self._forms[index]
        if isinstance(form, LowRank):
            round_ = form.begin([bucket.deliver(i, _OWN) for i in range(len(bucket.tensors))], None, _MEAN)
            self._rounds.append((index, round_))
            self.submit_bucket(index, bucket, form, round_.staged, _MEAN, lane)
        else:
            self.submit_bucket(index, bucket, form, bucket.stage(bucket.views[_OWN], _OWN), _MEAN, lane)

    def _go_on(self) -> None:
        """Start and await the second allreduce of low-rank compressed buckets. All ranks call this in the same step."""
        rounds, self._rounds = self._rounds, []
        for _, round_ in rounds:
            round_.halfway()
        self._second_works = [self._submit_second(index, round_, _MEAN) for index, round_ in rounds]
        self._await()
        for _, round_ in rounds:
            round_.finish()
            round_.learn()


def parts(parameters: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Split tensors in their order into `count` parts of about equal bytes, some of which may be empty."""
    sizes = [local(p).numel() * p.element_size() for p in parameters]
    total = sum(sizes) or 1
    found: list[list[torch.Tensor]] = [[] for _ in range(count)]
    before = 0
    for p, size in zip(parameters, sizes, strict=True):
        found[min(count - 1, (2 * before + size) * count // (2 * total))].append(p)
        before += size
    return found


def _wide(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of the parameter with at least 32 bits per value and the same order of elements in memory."""
    narrow = parameter.dtype in (torch.float16, torch.bfloat16)
    wide = torch.empty_like(parameter.data, dtype=torch.float32 if narrow else parameter.dtype)
    return wide.copy_(parameter.data)


def _told(told: Told) -> str:
    what = "averages weights" if told.settles else "sends a round's progress"
    return f"{what}, exchange {told.number} of parameters {told.layout:08x}"
